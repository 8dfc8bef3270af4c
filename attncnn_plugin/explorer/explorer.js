'use strict';

const PART_NAMES = {position: 'Position', content: 'Content', both: 'Both', attention: 'Attention'};
const ARRAYS = {uint8: Uint8Array, int16: Int16Array, float32: Float32Array, float64: Float64Array};
const EXACT = 1e-6;  // error of a probability up to which it counts as exact
const EXACT_PAGE = 1e-5;  // the same, relative to the largest probability of a query
const ARROWS = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};  // rows, columns
const byId = (id) => document.getElementById(id);
let page;  // the header of stream.py, with arrays in place of their descriptions
let height, width;  // of the page's grid, in whose pixels the state counts: the finest of all layers
const state = {
  image: 0, query: 0, token: null, locked: false, layer: 0, head: 0, part: null, key: null, theme: null};

// ---- Data ----

async function unpack(text) {
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(await inflate(bytes.subarray(4, 4 + length))));
  const data = (await inflate(bytes.subarray(4 + length))).buffer;
  const withArrays = (value) => {
    if (Array.isArray(value)) return value.map(withArrays);
    if (value === null || typeof value !== 'object') return value;
    if (value.dtype) {
      const count = value.shape.reduce((product, n) => product * n, 1);
      return {shape: value.shape, values: new ARRAYS[value.dtype](data, value.at, count)};
    }
    const inner = Object.fromEntries(Object.entries(value).map(([name, item]) => [name, withArrays(item)]));
    return inner.step ? quantized(inner) : inner;
  };
  return withArrays(header);
}

/** Numbers that are stored as whole multiples of a step, one for each index of the first axis. */
function quantized({low, high, step}) {
  const values = new Float32Array(low.values.length), inner = values.length / step.values.length;
  for (let i = 0; i < values.length; i++) {
    values[i] = (low.values[i] + 256 * high.values[i] - 128) * step.values[Math.floor(i / inner)];
  }
  return {shape: low.shape, values};
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// ---- Grids ----

const rowOf = (pixel) => Math.floor(pixel / width);
const columnOf = (pixel) => pixel % width;
const clamp = (at, count) => Math.min(Math.max(at, 0), count - 1);

/** The names of the tokens of a layer that lie beside its grid: class tokens, registers. */
const othersOf = (layer) => page.layers[layer].others ?? [];

/** The query of a layer: the chosen token beside the grid, where the layer has it, or the one at the chosen pixel. */
function shownQuery(layer) {
  const name = othersOf(layer)[state.token];
  return name === undefined ? queryOf(layer) : {other: state.token, name};
}

/** The query of a layer that is nearest to a pixel, the chosen one: its place, and its numbers among the queries. */
function queryOf(layer, pixel = state.query) {
  const {grid: [tall, wide], queries: {rows, columns}, keys: {start, source}} = page.layers[layer];
  const i = nearest(rows, (rowOf(pixel) + 0.5) * tall / height - 0.5);
  const j = nearest(columns, (columnOf(pixel) + 0.5) * wide / width - 0.5), row = rows[i], column = columns[j];
  const token = source.values[(row - start[0]) * source.shape[1] + column - start[1]];
  return {row, column, i, j, index: i * columns.length + j, token};
}

function nearest(places, at) {
  return places.reduce((best, place, i) => Math.abs(place - at) < Math.abs(places[best] - at) ? i : best, 0);
}

/** The key of a layer that the chosen pixel lies in. */
function keyOf(layer) {
  const {grid: [tall, wide]} = page.layers[layer], key = state.key ?? onPage(queryOf(layer), [tall, wide]);
  const row = Math.floor((rowOf(key) + 0.5) * tall / height), column = Math.floor((columnOf(key) + 0.5) * wide / width);
  return {row, column, index: row * wide + column};
}

/** The pixel of the page's grid in the middle of a pixel of another one. */
function onPage({row, column}, [tall, wide]) {
  const inside = (at, size, count) => clamp(Math.floor((at + 0.5) / size * count), count);
  return inside(row, tall, height) * width + inside(column, wide, width);
}

// ---- Probabilities ----

/** By term: a function that gives the score of a key by its numbers, its shift from the query and its token. */
const TERMS = {
  axes({rows, columns}, head, {i, j}) {
    const [, ...row] = rows.shape, [, ...column] = columns.shape;
    const atRow = (head * row[0] + i) * row[1], atColumn = (head * column[0] + j) * column[1];
    return (k1, k2) => rows.values[atRow + k1] + columns.values[atColumn + k2];
  },
  shifts({shifts}, head) {
    const [, tall, wide] = shifts.shape, middle = (head * tall + (tall >> 1)) * wide + (wide >> 1);
    return (k1, k2, down, right) => shifts.values[middle + down * wide + right];
  },
  query_axes({tokens, image, row_shifts: rows, column_shifts: columns}, head, {token}) {
    const byRow = coefficients(rows, head, tokens, image, token);
    const byColumn = coefficients(columns, head, tokens, image, token);
    return (k1, k2, down, right) => byRow[down + (byRow.length >> 1)] + byColumn[right + (byColumn.length >> 1)];
  },
  products({tokens, image, matrices}, head, query) {
    const weights = coefficients(matrices, head, tokens, image, query.token), [, images, count] = tokens.shape;
    const scores = new Float64Array(count);
    for (let j = 0; j < weights.length; j++) {
      const weight = weights[j], start = (j * images + image) * count;
      if (weight !== 0) for (let n = 0; n < count; n++) scores[n] += weight * tokens.values[start + n];
    }
    return (k1, k2, down, right, token) => scores[token];
  },
  encoded_products({tokens, image, ...others}, head, query) {
    return TERMS.products({tokens, image: image + tokens.shape[1] / 2, ...others}, head, query);
  },
};

/** Σ_i c_i table[i, head], with the coordinates c of a query's token after a first one that is 1. */
function coefficients(table, head, tokens, image, token) {
  const [rank, heads, length] = table.shape, [, images, count] = tokens.shape;
  const sum = new Float64Array(length);
  for (let i = 0; i < rank; i++) {
    const c = i === 0 ? 1 : tokens.values[((i - 1) * images + image) * count + token];
    const start = (i * heads + head) * length;
    if (c !== 0) for (let j = 0; j < length; j++) sum[j] += c * table.values[start + j];
  }
  return sum;
}

/** The arrays of all terms of a layer, and the place of the chosen image among those of the tokens. */
function arraysOf({arrays, token_arrays: groups}) {
  const shared = groups.length === 1;
  return {...arrays, ...groups[shared ? 0 : state.image], image: shared ? state.image : 0};
}

/** The probabilities of all pixels for a query, or null where the layer has not the part that is chosen. */
function probabilities(layer, head, query) {
  const {parts} = page.layers[layer], part = parts[partOf(layer)];
  if (!part) return null;
  if (part.relative) return stored(layer, head, query).probs;
  if (!part.shares) return softmax(layer, part.terms, head, query, massOf(part, head, query) ?? 1);
  const share = part.shares[head], probs = softmax(layer, parts.content.terms, head, query, 1 - share);
  const position = softmax(layer, parts.position.terms, head, query, share);
  for (let k = 0; k < probs.length; k++) probs[k] += position[k];
  return probs;
}

/** The probabilities that the page holds itself: of the patches, and of the tokens beside them or of padding. */
function stored(layer, head, query) {
  const {grid: [tall, wide], parts} = page.layers[layer];
  const {relative, largest, to_others: others} = parts[partOf(layer)], [, heads, queries, count] = relative.shape;
  const row = (state.image * heads + head) * queries + (query.other ?? othersOf(layer).length + query.index);
  const probs = new Float64Array(tall * wide + 1), keys = windowOf(layer, query);  // padding, which is 0, comes last
  for (let k = 0; k < count; k++) {
    probs[keys ? keys[k] : k] = relative.values[row * count + k] * largest.values[row];
  }
  const length = others.shape[3];
  return {
    probs: probs.subarray(0, tall * wide),
    others: [...others.values.subarray(row * length, (row + 1) * length)]};
}

/** The numbers of the patches in the window of a query, those of padding among them; undefined without windows. */
function windowOf(layer, query) {
  const {windows} = page.layers[layer];
  if (!windows) return undefined;
  const [, count] = windows.shape, start = Math.floor(windows.values.indexOf(query.index) / count) * count;
  return windows.values.subarray(start, start + count);
}

/** Those of them that the query sees: a shifted window goes around the border, but its mask does not. */
function seenOf(layer, query) {
  const keys = windowOf(layer, query), {masked} = page.layers[layer];
  return keys && keys.filter((_, k) => !masked.values[query.index * keys.length + k]);
}

/** The softmax over the keys of the sum of some terms, times a number, for the pixels that the keys are. */
function softmax(layer, terms, head, query, mass) {
  const {grid: [tall, wide], keys: {start, reach, source}} = page.layers[layer], arrays = arraysOf(page.layers[layer]);
  const functions = terms.map((term) => TERMS[term](arrays, head, query));
  const probs = new Float64Array(tall * wide + 1), scores = [], seen = [];  // zeros, which no pixel is, come last
  const [first, last] = [-1, 1].map((sign) => [query.row, query.column].map((at, axis) =>
    clamp(at - start[axis] + sign * reach[axis], source.shape[axis])));
  for (let k1 = first[0]; k1 <= last[0]; k1++) {
    for (let k2 = first[1]; k2 <= last[1]; k2++) {
      const down = k1 + start[0] - query.row, right = k2 + start[1] - query.column;
      const token = source.values[k1 * source.shape[1] + k2];
      let score = 0;
      for (const term of functions) score += term(k1, k2, down, right, token);
      scores.push(score);
      seen.push(token);
    }
  }
  let largest = -Infinity, total = 0;
  for (const score of scores) largest = Math.max(largest, score);
  for (let k = 0; k < seen.length; k++) {
    const weight = Math.exp(scores[k] - largest);
    total += weight;
    probs[seen[k]] += weight;
  }
  for (let k = 0; k < probs.length; k++) probs[k] *= mass / total;
  return probs.subarray(0, tall * wide);
}

/** What the null key of CMHSA leaves to the others; undefined without one. */
function massOf({mass}, head, query) {
  if (!mass) return undefined;
  const [images, heads, queries] = mass.shape, image = images === 1 ? 0 : state.image;
  return mass.values[(image * heads + head) * queries + query.index];
}

/** Whether probabilities lie outside of the image: with a null key, with zeros as keys, or with padded windows. */
function looksOutside(layer) {
  const {grid: [tall, wide], keys: {source}, parts} = page.layers[layer], part = parts[partOf(layer)];
  return 'mass' in part || source.values.includes(tall * wide) ||
    Boolean(part.relative) && part.to_others.shape[3] > othersOf(layer).length;
}

/** The part that is shown of a layer: the chosen one, or the only one that it has. */
function partOf(layer) {
  const parts = Object.keys(page.layers[layer].parts);
  return parts.length === 1 ? parts[0] : state.part;
}

/** What the page shows of a head: its probabilities, their sums and their centre, which needs a query with a place. */
function shownOf(layer, head, query) {
  const probs = probabilities(layer, head, query);
  if (!probs) return null;
  const shown = summary(probs, query, page.layers[layer].grid);
  if (!page.layers[layer].parts[partOf(layer)].relative) return shown;
  const {others} = stored(layer, head, query), rest = others.reduce((sum, p) => sum + p, 0);
  const placed = query.other === undefined ? {} : {near: null, center: null};
  return {...shown, ...placed, others, rest, total: Math.max(1 - rest, 0)};  // exact, unlike a sum of rounded ones
}

function summary(probs, query, [, wide]) {
  let total = 0, near = 0, down = 0, right = 0, largest = 0;
  for (let k = 0; k < probs.length; k++) {
    const dr = Math.floor(k / wide) - query.row, dc = k % wide - query.column;
    total += probs[k];
    down += probs[k] * dr;
    right += probs[k] * dc;
    if (Math.abs(dr) <= 1 && Math.abs(dc) <= 1) near += probs[k];
    if (probs[k] > probs[largest]) largest = k;
  }
  return {
    probs, query, near, total, center: total > 0 ? [down / total, right / total] : null,
    largest: {row: Math.floor(largest / wide), column: largest % wide}, most: probs[largest]};
}

// ---- Text ----

const place = ({row, column}) => `(${row}, ${column})`;
const spoken = ({row, column, name}) => name ? `token ${name}` : `row ${row}, column ${column}`;
const listed = (names) => names.length < 3 ? names.join(' and ') : `${names[0]} … ${names[names.length - 1]}`;
const labelOf = (layer) => page.layers[layer].label;
const nameOf = (layer, head) => `${labelOf(layer).replace(/^block /, 'Block ')}, head ${head}`;

/** A number with as many digits as its error leaves, four at most. */
function number(value, error = 0) {
  if (value === 0) return '0';
  if (value < error) return `< ${upwards(error)}`;
  if (error > value * 1e-4) return value.toFixed(Math.max(Math.ceil(-Math.log10(error)), 0));
  return value >= 0.001 ? String(Number(value.toPrecision(4))) : value.toExponential(2).replace('-', '−');
}

/** An error with one digit, rounded up. */
function upwards(error) {
  const unit = 10 ** Math.floor(Math.log10(error));
  return String(Number((Math.ceil(error / unit) * unit).toPrecision(1))).replace('-', '−');
}

function shift(pair) {
  return pair ? `(${pair.map((x) => signed(x)).join(', ')})` : '–';
}

function signed(x) {
  const text = Math.abs(x).toFixed(2);
  return (Number(text) === 0 ? '' : x < 0 ? '−' : '+') + text;
}

// ---- Drawing ----

const scratch = document.createElement('canvas');
let faded = [], fadedFor = null;  // the pictures, grey and faint, in the colours of a theme

function pictureCanvas(picture, change) {
  const [rows, columns] = picture.shape, canvas = document.createElement('canvas');
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(columns, rows), from = picture.values;
  for (let i = 0; i < rows * columns; i++) {
    const rgb = [from[3 * i], from[3 * i + 1], from[3 * i + 2]];
    const [r, g, b] = change ? change(rgb) : rgb;
    image.data.set([r, g, b, 255], 4 * i);
  }
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

function fadePictures() {
  const dark = document.documentElement.dataset.theme === 'dark';
  if (fadedFor === dark) return;
  fadedFor = dark;
  faded = page.pictures.map((picture) => pictureCanvas(picture, ([r, g, b]) => {
    const grey = (0.299 * r + 0.587 * g + 0.114 * b) * 0.2 + (dark ? 20 : 200);  // --ground is the middle
    return [grey, grey, grey];
  }));
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Gives a canvas the screen's own pixels. */
function fit(canvas, wide = canvas.clientWidth) {
  const w = Math.max(Math.round(wide * devicePixelRatio), width), h = Math.max(Math.round(w * height / width), height);
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, {width: w, height: h});
}

function drawPicture(context, picture) {
  const {width: w, height: h} = context.canvas;
  // Pixels as squares where there are few of them.
  context.imageSmoothingEnabled = picture.width > w;
  context.drawImage(picture, 0, 0, w, h);
}

function drawMap(context, probs, rgb, [tall, wide]) {
  const {width: w, height: h} = context.canvas;
  drawPicture(context, faded[state.image]);
  const image = new ImageData(wide, tall);
  let largest = 0;
  for (let k = 0; k < probs.length; k++) largest = Math.max(largest, probs[k]);
  for (let k = 0; k < probs.length && largest > 0; k++) image.data.set([...rgb, 255 * probs[k] / largest], 4 * k);
  scratch.width = wide;
  scratch.height = tall;
  scratch.getContext('2d').putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(scratch, 0, 0, w, h);
}

/** The outline of the patches of a window. */
function drawWindow(context, keys, [tall, wide]) {
  const w = context.canvas.width / wide, h = context.canvas.height / tall, inside = new Set(keys);
  const has = (row, column) => row >= 0 && row < tall && column >= 0 && column < wide && inside.has(row * wide + column);
  const path = new Path2D(), line = 2 * devicePixelRatio, half = line / 2;  // on the inner side of the edges
  for (const key of inside) {
    const row = Math.floor(key / wide), column = key % wide;
    const [left, right, top, bottom] = [column * w, (column + 1) * w, row * h, (row + 1) * h];
    for (const [down, across, x1, y1, x2, y2] of [
      [-1, 0, left, top + half, right, top + half], [1, 0, left, bottom - half, right, bottom - half],
      [0, -1, left + half, top, left + half, bottom], [0, 1, right - half, top, right - half, bottom]]) {
      if (has(row + down, column + across)) continue;
      path.moveTo(x1, y1);
      path.lineTo(x2, y2);
    }
  }
  context.strokeStyle = color('--accent');
  context.lineWidth = line;
  context.stroke(path);
}

/** The outline of a pixel inside of it, with a halo inside of that so that it stands out of every picture. */
function drawPixel(context, {row, column}, [tall, wide], dash = []) {
  const {width: w, height: h} = context.canvas;
  const edges = (at, size, count) => [Math.round(at * size / count), Math.round((at + 1) * size / count)];
  const [left, right] = edges(column, w, wide), [top, bottom] = edges(row, h, tall);
  const size = Math.min(right - left, bottom - top);
  const line = Math.min(Math.max(Math.round(size / 10), 1), 2 * devicePixelRatio);
  const strokes = [[color('--halo'), 2 * line, []], [color('--query'), line, dash]];
  for (const [style, thick, pattern] of size < 8 * line ? strokes.slice(1) : strokes) {
    context.strokeStyle = style;
    context.lineWidth = thick;
    context.setLineDash(pattern.map((length) => length * devicePixelRatio));
    context.strokeRect(left + thick / 2, top + thick / 2, right - left - thick, bottom - top - thick);
  }
  context.setLineDash([]);
}

/** The outline of a query that has a place, and that of the keys in its window. */
function drawQuery(context, layer, query) {
  const {grid} = page.layers[layer], keys = seenOf(layer, query);
  if (keys) drawWindow(context, keys, grid);
  if (query.other === undefined) drawPixel(context, query, grid);
}

function drawCenter(context, query, center, [tall, wide]) {
  const w = context.canvas.width / wide, h = context.canvas.height / tall, dot = devicePixelRatio;
  const x = (query.column + center[1] + 0.5) * w, y = (query.row + center[0] + 0.5) * h;
  const radius = Math.min(Math.max(4 * dot, Math.min(w, h) * 0.3), 7 * dot);
  for (const [style, line] of [[color('--halo'), 4 * dot], [color('--center'), 2 * dot]]) {
    context.strokeStyle = style;
    context.lineWidth = line;
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.stroke();
  }
}

let cells = [];  // by layer and head: {button, context, caption}

function buildTable() {
  const table = byId('maps'), heads = Math.max(...page.layers.map((layer) => layer.heads));
  const head = table.createTHead().insertRow();
  head.insertCell();
  for (let h = 0; h < heads; h++) {
    const th = document.createElement('th');
    th.scope = 'col';
    th.append(textOf('span', 'Head ', 'wide'), String(h));
    head.append(th);
  }
  table.classList.toggle('named', page.layers.some((layer) => !/^block \d+$/.test(layer.label)));
  table.style.minWidth = `${heads * 32 + 24}px`;
  table.style.maxWidth = `calc(4.2rem + ${heads * Math.max(160 * Math.min(width / height, 1) + 12, 56)}px)`;
  const body = table.createTBody();
  cells = page.layers.map((layer, l) => {
    const row = body.insertRow(), th = document.createElement('th');
    th.scope = 'row';
    th.title = layer.name;
    const [, block, rest] = /^(block )?(.*)$/.exec(layer.label);
    th.append(textOf('span', block ? 'Block ' : '', 'wide'), rest.replaceAll('.', '.\u200b'));  // where a line may end
    row.append(th);
    return Array.from({length: layer.heads}, (_, h) => {
      const button = document.createElement('button'), canvas = document.createElement('canvas');
      const caption = textOf('span', '', 'wide');
      button.type = 'button';
      button.tabIndex = -1;
      canvas.style.aspectRatio = width / height;
      button.append(canvas, caption);
      button.addEventListener('click', () => change({layer: l, head: h}));
      row.insertCell().append(button);
      return {button, canvas, context: canvas.getContext('2d'), caption};
    });
  });
}

/** Buttons and swatches of the tokens beside the grid, of the layer that has most of them. */
function buildTokens() {
  const names = page.layers.map((_, l) => othersOf(l)).reduce((a, b) => b.length > a.length ? b : a);
  names.forEach((name, i) => {
    const button = textOf('button', name), item = document.createElement('li'), swatch = textOf('i', '', 'swatch');
    button.type = 'button';
    button.setAttribute('aria-label', `Query: token ${name}`);
    // A second click goes back to the pixel, as one on a pixel frees it.
    button.addEventListener('click', () => change(
      state.token === i ? {token: null, locked: false} : {token: i, locked: true}));
    byId('query-tokens').append(button);
    item.append(swatch, textOf('span', name), textOf('strong', ''));
    byId('map-tokens').append(item);
  });
  for (const element of document.querySelectorAll('.beside')) element.classList.toggle('has-tokens', names.length > 0);
  for (const id of ['query-tokens', 'map-tokens']) byId(id).hidden = names.length === 0;
}

function renderTokens(shown, rgb) {
  const others = othersOf(state.layer);
  [...byId('query-tokens').children].forEach((button, i) => {
    button.disabled = i >= others.length;
    button.setAttribute('aria-pressed', String(i === state.token && !button.disabled));
  });
  [...byId('map-tokens').children].forEach((item, i) => {
    const [swatch, , text] = item.children, p = shown?.others?.[i] ?? 0;
    item.hidden = i >= others.length;
    item.classList.toggle('query', i === shown?.query.other);
    swatch.style.backgroundColor = `rgb(${rgb.join(' ')} / ${shown?.most > 0 ? Math.min(p / shown.most, 1) : 0})`;
    text.textContent = number(p);
  });
}

/** Goes some layers down and some heads to the right, and past layers all of whose heads were pruned. */
function choose(down, right) {
  let layer = state.layer + down;
  while (cells[layer] && cells[layer].length === 0) layer += down || 1;
  if (!cells[layer]) return;
  const head = Math.min(Math.max(state.head + right, 0), cells[layer].length - 1);
  change({layer, head});
}

function textOf(tag, text, className) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

function render() {
  fadePictures();
  const rgb = color('--attention').split(' ').map(Number);
  const wide = cells.flat()[0]?.canvas.clientWidth;  // all are as wide
  const all = page.layers.map((layer, l) => {
    const query = shownQuery(l);
    return Array.from({length: layer.heads}, (_, h) => shownOf(l, h, query));
  });
  all.forEach((heads, l) => heads.forEach((shown, h) => {
    const {canvas, context, button, caption} = cells[l][h], chosen = l === state.layer && h === state.head;
    const {grid} = page.layers[l];
    button.setAttribute('aria-pressed', String(chosen));
    button.tabIndex = chosen ? 0 : -1;
    if (shown) {
      fit(canvas, wide);
      drawMap(context, shown.probs, rgb, grid);
      drawQuery(context, l, shown.query);
      caption.textContent = Number(shown.most.toPrecision(2));
      button.setAttribute('aria-label', `${nameOf(l, h)}: largest probability ` +
        `${number(shown.most, errorOf(l, h, shown))} at ${spoken(shown.largest)}`);
    }
  }));
  const heads = all[state.layer], shown = heads[state.head];
  renderQuery(shown && shown.center);
  renderTokens(shown, rgb);
  if (shown) {
    renderMap(shown, rgb);
    renderNumbers(shown);
    renderCenters(heads);
  }
  for (const input of document.querySelectorAll('input[type=radio]')) {
    input.checked = input.value === String(state[input.name]);
  }
  settle();
}

/** The largest error of a probability of the query that is shown, 0 for those that are exact. */
function errorOf(layer, head, shown) {
  const error = page.layers[layer].parts[partOf(layer)].errors[head] * shown.most;
  return error <= EXACT ? 0 : error;
}

/** The largest error of all probabilities of the page, as a sentence. */
function accuracy() {
  const errors = page.layers.flatMap((layer) => Object.values(layer.parts).flatMap((part) => part.errors));
  const largest = Math.max(0, ...errors), stored = page.layers.some((layer) => layer.others);  // rounded, however little
  return largest <= (stored ? EXACT : EXACT_PAGE) ? 'All probabilities are exact.' :
    `All probabilities err by at most ${upwards(100 * largest)}% of the largest one of their query.`;
}

/** Names an element that has not the focus: of one that has it, the live region tells what changes. */
function name(element, label) {
  if (document.activeElement !== element) element.setAttribute('aria-label', label);
}

function renderQuery(center) {
  const canvas = byId('query'), context = canvas.getContext('2d');
  const query = shownQuery(state.layer), {grid} = page.layers[state.layer];
  fit(canvas);
  drawPicture(context, pictures[state.image]);
  drawQuery(context, state.layer, query);
  if (center) drawCenter(context, query, center, grid);
  byId('query-place').textContent = query.name ? `Token ${query.name}` : `Row ${query.row}, column ${query.column}`;
  byId('lock').setAttribute('aria-pressed', String(state.locked));
  byId('image-name').textContent = page.names[state.image];
  name(canvas, `${page.names[state.image]}, query ${query.name ? '' : 'pixel at '}${spoken(query)}${state.locked ? ', locked' : ''}`);
}

function renderMap(shown, rgb) {
  const canvas = byId('map'), context = canvas.getContext('2d'), title = nameOf(state.layer, state.head);
  const error = errorOf(state.layer, state.head, shown), key = keyOf(state.layer), {query} = shown;
  const {grid, queries: {rows, columns}, windows, others} = page.layers[state.layer];
  const probability = number(shown.probs[key.index], error);
  fit(canvas);
  drawMap(context, shown.probs, rgb, grid);
  drawQuery(context, state.layer, query);
  if (state.key !== null || query.name) drawPixel(context, key, grid, [4, 3]);
  if (shown.center) drawCenter(context, query, shown.center, grid);
  byId('map-title').textContent = title;
  byId('grid').textContent = `${grid.join('×')} ${others ? 'patches' : 'pixels'}, ${rows.length}×${columns.length} queries` +
    (windows ? `, in windows of ${windows.shape[1]}. What the query sees is outlined.` : '.');
  byId('ramp-end').textContent = number(shown.most, error);
  byId('key-place').textContent = place(key);
  byId('key-probability').textContent = probability;
  name(canvas, `${title}: where ${spoken(query)} attends, key at ${spoken(key)}: ${probability}`);
}

function renderNumbers(shown) {
  const error = errorOf(state.layer, state.head, shown), outside = looksOutside(state.layer);
  const {centers} = page.layers[state.layer], encoded = centers && centers[state.head];
  const others = othersOf(state.layer), beside = others.length ? `${number(shown.rest)} lies on ${listed(others)}` : '';
  const texts = {
    'largest-place': place(shown.largest), 'largest': number(shown.most, error),
    'near': shown.near === null ? '–' : number(shown.near, 3 * error),  // √9 times that of one: they are not alike
    'total': outside || beside ? number(shown.total) : '', 'total-rest': beside || 'the rest lies outside', 'center': shift(shown.center),
    'encoded-center': shift(encoded),
    'error': error === 0 ? 'exact' : `${upwards(error)} (${upwards(100 * error / shown.most)}%)`,
  };
  for (const [id, text] of Object.entries(texts)) byId(id).textContent = text;
  for (const element of document.querySelectorAll('.encoded')) element.hidden = !encoded;
  for (const element of document.querySelectorAll('.total')) element.hidden = !outside && !beside;
}

/** The centres of all heads of the chosen layer, as shifts from the query: rows down, columns right. */
function renderCenters(heads) {
  const svg = byId('centers'), encoded = page.layers[state.layer].centers;
  const centers = heads.map((shown, h) => encoded ? encoded[h] : shown && shown.center);
  const known = centers.filter(Boolean).flat().map(Math.abs);
  const {grid} = page.layers[state.layer];
  const reach = Math.min(Math.max(3, Math.ceil(Math.max(0, ...known) + 0.6)), Math.max(...grid));
  const place = (x) => Math.min(Math.max(x, -reach), reach), edge = (reach + 0.5) * 1.12;
  const unit = edge / 10, grain = reach > 8 ? 4 : reach > 4 ? 2 : 1;
  svg.setAttribute('viewBox', `${-edge} ${-edge} ${2 * edge} ${2 * edge}`);
  svg.replaceChildren();
  const add = (parent, tag, attributes, text) => {
    const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  for (let t = -reach + reach % grain; t <= reach; t += grain) {
    const axis = t === 0 ? 0.16 * unit : 0.07 * unit;
    add(svg, 'line', {class: 'grid', x1: t, x2: t, y1: -reach, y2: reach, 'stroke-width': axis});
    add(svg, 'line', {class: 'grid', x1: -reach, x2: reach, y1: t, y2: t, 'stroke-width': axis});
    for (const [x, y] of [[t, edge - 0.45 * unit], [-edge + 0.8 * unit, t]]) {
      const tick = add(svg, 'text', {class: 'tick', x, y}, String(t).replace('-', '−'));
      tick.style.fontSize = `${0.8 * unit}px`;
    }
  }
  add(svg, 'rect', {class: 'here', x: -0.5, y: -0.5, width: 1, height: 1, 'stroke-width': 0.2 * unit});
  // The chosen head comes last, above the others.
  const order = [...centers.keys()].sort((a, b) => (a === state.head) - (b === state.head));
  for (const h of order) {
    if (!centers[h]) continue;
    const [row, column] = centers[h];
    const group = add(svg, 'g', {
      class: h === state.head ? 'head chosen' : 'head', transform: `translate(${place(column)} ${place(row)})`});
    add(group, 'circle', {r: 0.7 * unit, 'stroke-width': 0.15 * unit});
    add(group, 'text', {}, h).style.fontSize = `${0.85 * unit}px`;
    add(group, 'title', {}, `Head ${h}: ${shift(centers[h])}`);
    group.addEventListener('click', () => change({head: h}));
  }
  byId('centers-title').textContent = `Centres of ${labelOf(state.layer)}`;
  byId('centers-help').textContent = heads[0]?.query.name ? `The ${heads[0].query.name} token has no place.` : (encoded ? 'Δ of the encoding' : 'Mean shift of the attention from this query') +
    ' in tokens, rows down and columns right.' +
    (known.some((x) => x > reach) ? ' Those at the edge lie beyond it.' : '');
  name(svg, `Centres of ${labelOf(state.layer)}, rows down and columns right: ` +
    centers.map((center, h) => `head ${h} ${shift(center)}`).join('; '));
}

// ---- State ----

let frame = null;

function change(changes) {
  Object.assign(state, changes);
  const layer = page.layers[state.layer];
  if (layer.heads) state.head = Math.min(state.head, layer.heads - 1);
  if (frame === null) {
    frame = requestAnimationFrame(() => {
      frame = null;
      render();
    });
  }
}

let settling = null;

/** What follows a change when no other one has come for a moment: what is read aloud, and the address. */
function settle() {
  clearTimeout(settling);
  settling = setTimeout(() => {
    settling = null;
    const [key, probability, center] = ['key-place', 'key-probability', 'center'].map((id) => byId(id).textContent);
    byId('live').textContent = `Query ${spoken(shownQuery(state.layer))}${state.locked ? ', locked' : ''}. ` +
      `${nameOf(state.layer, state.head)}: probability of key ${key} is ${probability}, centre ${center}.`;
    try {
      if (toAddress() !== location.hash) history.replaceState(null, '', toAddress());
    } catch {
      // The document of an <iframe srcdoc>, as in notebooks, has no address of its own.
    }
  }, 150);
}

function toAddress() {
  const pair = (pixel) => `${rowOf(pixel)},${columnOf(pixel)}`;
  const parts = [
    `image=${state.image}`, `query=${pair(state.query)}`, `layer=${state.layer}`, `head=${state.head}`,
    `part=${state.part}`];
  if (state.token !== null) parts.push(`token=${state.token}`);
  if (state.locked) parts.push('locked=1');
  if (state.key !== null) parts.push(`key=${pair(state.key)}`);
  if (state.theme) parts.push(`theme=${state.theme}`);
  return `#${parts.join('&')}`;
}

/** The state in the address; what does not fit this page is passed over. */
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const changes = {key: null, token: null, locked: given.get('locked') === '1'};
  const index = (name, end) => {
    const value = given.get(name);
    if (value !== null && /^\d+$/.test(value) && Number(value) < end) changes[name] = Number(value);
  };
  const pair = (name) => {
    const match = /^(\d+),(\d+)$/.exec(given.get(name) || '');
    if (match && match[1] < height && match[2] < width) changes[name] = match[1] * width + Number(match[2]);
  };
  index('token', Math.max(...page.layers.map((_, l) => othersOf(l).length)));
  index('image', page.names.length);
  index('layer', page.layers.length);
  if (changes.layer !== undefined && !page.layers[changes.layer].heads) delete changes.layer;
  index('head', Math.max(page.layers[changes.layer ?? state.layer].heads, 1));
  pair('query');
  pair('key');
  if (allParts().includes(given.get('part'))) changes.part = given.get('part');
  if (['light', 'dark'].includes(given.get('theme'))) changes.theme = given.get('theme');
  change(changes);
  applyTheme();
}

const allParts = () => Object.keys(PART_NAMES).filter((part) => page.layers.some((layer) => part in layer.parts));

// ---- Theme ----

const prefersDark = matchMedia('(prefers-color-scheme: dark)');

function applyTheme() {
  const theme = state.theme || (prefersDark.matches ? 'dark' : 'light');
  document.documentElement.dataset.theme = theme;
  byId('theme').textContent = theme === 'dark' ? 'Light theme' : 'Dark theme';
}

// ---- Pointer and keyboard ----

function pixelAt(canvas, event) {
  const box = canvas.getBoundingClientRect();
  const inside = (at, start, size, count) => clamp(Math.floor((at - start) / size * count), count);
  return inside(event.clientY, box.top, box.height, height) * width + inside(event.clientX, box.left, box.width, width);
}

function arrowOf(event) {
  if (ARROWS[event.key]) event.preventDefault();
  return ARROWS[event.key];
}

/** The next query of the chosen layer, and the next key, on the page's grid. */
function movedQuery([down, right]) {
  const {grid, queries: {rows, columns}} = page.layers[state.layer], {i, j} = queryOf(state.layer);
  return onPage({row: rows[clamp(i + down, rows.length)], column: columns[clamp(j + right, columns.length)]}, grid);
}

function movedKey([down, right]) {
  const {grid} = page.layers[state.layer], {row, column} = keyOf(state.layer);
  return onPage({row: clamp(row + down, grid[0]), column: clamp(column + right, grid[1])}, grid);
}

function listen() {
  const query = byId('query'), map = byId('map');
  let held = null;  // the pixel that was locked when the pointer came down
  const sameQuery = (pixel) => held !== null && queryOf(state.layer, held).index === queryOf(state.layer, pixel).index;
  const chooseQuery = (event) => {
    const pixel = pixelAt(query, event);
    change({query: pixel, token: null, locked: !sameQuery(pixel)});
  };
  const chooseKey = (event) => change({key: pixelAt(map, event)});
  query.addEventListener('pointerdown', () => {
    held = state.locked && state.token === null ? state.query : null;
  });
  query.addEventListener('pointermove', (event) => {
    const pixel = pixelAt(query, event);
    if (event.pointerType === 'touch') {
      // What a finger is drawn to stays, though it comes back to where it was.
      if (!sameQuery(pixel)) held = null;
      change({query: pixel, token: null, locked: true});
    } else if (!state.locked) change({query: pixel, token: null});
  });
  query.addEventListener('click', chooseQuery);
  query.addEventListener('keydown', (event) => {
    const arrow = arrowOf(event);
    // Locked, so that a pointer that rests on the image does not move it back.
    if (arrow) change({query: movedQuery(arrow), token: null, locked: true});
    else if (event.key === 'Escape') change({locked: false});
    else if (event.key === 'Enter' || event.key === ' ') {
      event.preventDefault();
      change({locked: !state.locked});
    }
  });
  byId('lock').addEventListener('click', () => change({locked: !state.locked}));
  map.addEventListener('pointermove', (event) => {
    if (event.pointerType !== 'touch') change({key: pixelAt(map, event)});
  });
  map.addEventListener('click', chooseKey);
  // Chromium sends no click for some taps that come after a drawn finger. Where it does, it chooses the same once more.
  for (const [canvas, choose] of [[query, chooseQuery], [map, chooseKey]]) {
    canvas.addEventListener('pointerup', (event) => {
      if (event.pointerType === 'touch') choose(event);
    });
  }
  map.addEventListener('keydown', (event) => {
    const arrow = arrowOf(event);
    if (arrow) change({key: movedKey(arrow)});
    else if (event.key === 'Escape') change({key: null});
  });
  byId('maps').addEventListener('keydown', (event) => {
    const arrow = arrowOf(event);
    if (!arrow) return;
    choose(...arrow);
    cells[state.layer][state.head].button.focus();
  });
  byId('centers').addEventListener('keydown', (event) => {
    const arrow = arrowOf(event);
    if (arrow) choose(0, arrow[0] + arrow[1]);
  });
  for (const id of ['query', 'map', 'centers']) byId(id).addEventListener('blur', () => change({}));
  for (const id of ['query', 'maps']) new ResizeObserver(() => change({})).observe(byId(id));
  byId('theme').addEventListener('click', () => {
    state.theme = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
    applyTheme();
    change({});
  });
  prefersDark.addEventListener('change', () => {
    applyTheme();
    change({});
  });
  addEventListener('hashchange', fromAddress);
}

// ---- Start ----

let pictures = [];

function addChoice(fieldset, name, value, label, content) {
  const element = document.createElement('label'), input = document.createElement('input');
  input.type = 'radio';
  input.name = name;
  input.value = value;
  input.setAttribute('aria-label', label);
  element.title = label;
  input.addEventListener('change', () => change({[name]: typeof state[name] === 'number' ? Number(value) : value}));
  element.append(input, content);
  fieldset.append(element);
}

async function start() {
  if (typeof DecompressionStream === 'undefined') throw new Error('this browser is too old for this page');
  page = await unpack(byId('data').textContent);
  byId('data').remove();
  [height, width] = page.grid;
  pictures = page.pictures.map((picture) => pictureCanvas(picture));
  pictures.forEach((picture, i) => addChoice(byId('images'), 'image', i, page.names[i], picture));
  const parts = allParts();
  for (const part of parts) addChoice(byId('parts'), 'part', part, PART_NAMES[part], PART_NAMES[part]);
  byId('parts').hidden = parts.length < 2;
  state.part = parts[parts.length - 1];
  state.query = Math.floor(height / 2) * width + Math.floor(width / 2);
  state.layer = Math.max(page.layers.findIndex((layer) => layer.heads), 0);
  for (const id of ['query', 'map']) {
    byId(id).style.aspectRatio = width / height;
    byId(id).style.maxWidth = `${26 * width / height}rem`;  // at most 26rem high
  }
  byId('accuracy').textContent = accuracy();
  byId('grid').hidden = page.layers.every(({grid, queries: {rows, columns}, windows}) => !windows &&
    String([...grid, rows.length, columns.length]) === String([...page.grid, ...page.grid]));
  buildTable();
  buildTokens();
  listen();
  fromAddress();
  byId('status').hidden = true;
  byId('main').hidden = false;
  render();
}

applyTheme();
start().catch((error) => {
  byId('status').textContent = `The page cannot be shown: ${error.message}`;
  throw error;
});
