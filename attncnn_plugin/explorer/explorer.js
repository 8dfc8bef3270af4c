'use strict';

const SCALE_NAMES = {same: 'Same for all heads', own: 'Each its own'};
const PART_NAMES = {position: 'Position', content: 'Content', both: 'Both', attention: 'Attention'};
const PART_TITLES = {
  position: 'Only the term of where a key is from the query', content: 'Only the term of what the tokens hold',
  both: 'Both terms, as the network computes'};
const ARRAYS = {uint8: Uint8Array, int32: Int32Array, float32: Float32Array};
const ARROWS = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};  // rows, columns
const byId = (id) => document.getElementById(id);
let page;  // the data, see layer_data.py and page.py
let height, width;  // of the page's grid, in whose pixels the state counts: the finest of all layers
const state = {
  image: 0, query: 0, token: null, locked: false, layer: 0, head: 0, part: null, scale: 'same', key: null, theme: null};

// ---- Data ----

/** A part of the data with its arrays unpacked. */
async function unpack(value) {
  if (value === null || typeof value !== 'object') return value;
  if (value.dtype) {
    const binary = atob(value.data), bytes = new Uint8Array(binary.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
    return {shape: value.shape, values: new ARRAYS[value.dtype](await new Response(stream).arrayBuffer())};
  }
  const items = await Promise.all(Object.values(value).map(unpack));
  return Array.isArray(value) ? items : Object.fromEntries(Object.keys(value).map((name, i) => [name, items[i]]));
}

// ---- Grids ----

const rowOf = (pixel) => Math.floor(pixel / width);
const columnOf = (pixel) => pixel % width;
const clamp = (at, count) => Math.min(Math.max(at, 0), count - 1);

/** The query of a layer: the chosen token beside the grid, where the layer has it, or the one at the chosen pixel. */
function shownQuery(layer) {
  const name = page.layers[layer].others[state.token];
  return name === undefined ? queryOf(layer) : {number: state.token, name};
}

/** The query of a layer that is nearest to a pixel, the chosen one: its place, and its number among all queries. */
function queryOf(layer, pixel = state.query) {
  const {grid: [tall, wide], rows, columns, others} = page.layers[layer];
  const i = nearest(rows, (rowOf(pixel) + 0.5) * tall / height - 0.5);
  const j = nearest(columns, (columnOf(pixel) + 0.5) * wide / width - 0.5);
  return {row: rows[i], column: columns[j], i, j, number: others.length + i * columns.length + j};
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

/** The part that is shown of a layer: the chosen one, or the last one that it has. */
const partOf = ({parts}) => parts[state.part] ?? Object.values(parts).pop();

/** The numbers of the keys in the window of a query, H·W for those that it does not see; undefined without windows. */
function windowOf({keys}, {number}) {
  return keys?.values.subarray(number * keys.shape[1], (number + 1) * keys.shape[1]);
}

/** What the page shows of a head: its probabilities, their sums and their centre. */
function shownOf(layer, head, query) {
  const {grid: [tall, wide]} = layer, images = partOf(layer);
  const {bytes, largest, beside: others} = images[images.length === 1 ? 0 : state.image];
  const [, queries, count] = bytes.shape, row = head * queries + query.number, keys = windowOf(layer, query);
  const probs = new Float64Array(tall * wide + 1), most = largest.values[row];  // keys that are not seen come last
  for (let k = 0; k < count; k++) probs[keys ? keys[k] : k] = (bytes.values[row * count + k] / 255) ** 2 * most;
  const beside = [...others.values.subarray(row * others.shape[2], (row + 1) * others.shape[2])];
  const rest = beside.reduce((sum, p) => sum + p, 0), shown = {query, most, beside, rest, probs: probs.subarray(0, -1)};
  let sum = 0, near = 0, down = 0, right = 0, at = 0;
  shown.probs.forEach((p, k) => {
    const dr = Math.floor(k / wide) - query.row, dc = k % wide - query.column;
    sum += p;
    down += p * dr;
    right += p * dc;
    if (Math.abs(dr) <= 1 && Math.abs(dc) <= 1) near += p;
    if (p > probs[at]) at = k;
  });
  const seen = keys ? keys.filter((key) => key < tall * wide).length : tall * wide;
  const placed = query.name ? {near: null, center: null} : {near, center: sum > 0 ? [down / sum, right / sum] : null};
  return {...shown, ...placed, seen, largest: {row: Math.floor(at / wide), column: at % wide}};
}

const summaries = {};

/** What a head gives each shift from query to key, as a mean over images and queries, and how far it spreads. */
function summaryOf(l, head) {
  const layer = page.layers[l], {grid: [tall, wide], rows, columns, others, keys} = layer, images = partOf(layer);
  const id = [l, head, state.part].join();
  if (summaries[id]) return summaries[id];
  const count = images[0].bytes.shape[2], number = rows.length * columns.length, none = tall * wide;
  const [down, right] = [rows, columns].map((places) => places.map((place) => Math.round(place)));
  const up = Math.max(...down), left = Math.max(...right), across = left + wide - Math.min(...right);
  const shifts = (up + tall - Math.min(...down)) * across;
  const sums = new Float64Array(shifts), times = new Float64Array(shifts);
  const low = new Float64Array(shifts).fill(1), high = new Float64Array(shifts);
  let entropy = 0, beside = 0;
  for (const {bytes: {values}, largest, beside: {shape, values: given}} of images) {
    for (let q = 0; q < number; q++) {
      const row = head * (others.length + number) + others.length + q, most = largest.values[row];
      const from = (up - down[Math.floor(q / columns.length)]) * across + left - right[q % columns.length];
      let sum = 0, logs = 0;
      for (let k = 0; k < count; k++) {
        const key = keys ? keys.values[(others.length + q) * count + k] : k;
        if (key === none) continue;
        const p = (values[row * count + k] / 255) ** 2 * most, at = from + Math.floor(key / wide) * across + key % wide;
        sums[at] += p;
        times[at]++;
        low[at] = Math.min(low[at], p);
        high[at] = Math.max(high[at], p);
        if (p > 0) logs -= p * Math.log(p);
        sum += p;
      }
      entropy += sum > 0 ? Math.log(sum) + logs / sum : 0;
      for (let t = 0; t < shape[2]; t++) beside += given[row * shape[2] + t];
    }
  }
  const queries = number * images.length, half = Math.min(queries / 2, Math.max(...times));
  const share = sums.map((sum, at) => times[at] >= half ? sum / times[at] : 0), at = share.indexOf(Math.max(...share));
  return summaries[id] = {
    shift: [Math.floor(at / across) - up, at % across - left], share: share[at], low: low[at], high: high[at],
    spread: Math.exp(entropy / queries), beside: beside / queries};
}

/** The layer and the head with the largest mean probability of one shift, which is seen by half of the queries. */
function mostLocal() {
  let best = {share: -1, layer: 0, head: 0};
  page.layers.forEach(({heads}, layer) => {
    for (let head = 0; head < heads; head++) {
      const {share} = summaryOf(layer, head);
      if (share > best.share) best = {share, layer, head};
    }
  });
  return {layer: best.layer, head: best.head};
}

// ---- Text ----

/** Whole percents, and tenths near 0 and 1, rounded down near 1. */
const percent = (p) => `${p > 0.0095 && p < 0.99 ? Math.round(100 * p) : Math.floor(1000 * p + 0.01) / 10}%`;

/** Which token is at a shift from the query. */
function tokenAt([down, right]) {
  const [row, column] = [down, right].map((x) => Math.round(x)), next = Math.abs(row) + Math.abs(column) === 1;
  const far = (x, before, after) => x ? `${next ? '' : `${Math.abs(x)} `}${x < 0 ? before : after}` : '';
  const where = [far(row, 'above', 'below'), far(column, 'to the left', 'to the right')].filter(Boolean);
  return where.length ? `the token ${where.join(' and ')}` : 'the query itself';
}

/** The two standard deviations of a Gaussian whose inverse covariance is MMᵀ, the larger one first. */
function widthsOf([[a, b], [c, d]]) {
  const sum = a * a + b * b + c * c + d * d, root = Math.sqrt(Math.max(sum ** 2 - 4 * (a * d - b * c) ** 2, 0));
  return [Math.max(sum - root, 0), sum + root].map((square) => Math.sqrt(2 / square));
}

/** A sentence on what a head does. */
function sentence(l, head) {
  const layer = page.layers[l], {label, centers, factors, keys, grid, others} = layer, found = summaryOf(l, head);
  const byPosition = Object.keys(layer.parts)[0] === 'position' && partOf(layer) === layer.parts.position;
  const {share, low, high, spread, beside} = found, range = `${percent(low)} to ${percent(high)}`;
  let text = `Head ${head} of ${label}`, most = tokenAt(found.shift);
  if (centers) {
    const where = tokenAt(centers[head]), widest = 2 * Math.max(...grid);
    const rounded = (width) => width > widest ? '∞' : Number(width.toPrecision(2));
    const widths = [...new Set(widthsOf(factors[head]).map(rounded))].join(' by ');
    text += ` is a Gaussian, ${widths === '∞' ? 'wider than the image' : `${widths} tokens wide`}, around ${where}. It`;
    if (where === most) most = 'that token';
  }
  const number = keys ? keys.shape[1] : grid[0] * grid[1];
  const over = `spreads over about ${Number(spread.toPrecision(2))} of ${number} tokens`;
  if (spread > 0.9 * number) return `${text} is nearly uniform: it ${over}.`;
  text += share >= 0.5 ? ` gives ${most} ${percent(share)} of its attention on average` :
    ` ${over}; on average ${most} gets most, ${percent(share)}`;
  text += byPosition ? `, whatever the image (${range}, by query).` : low >= 0.5 ?
    `, in all images here (${range}, by image and query).` : `. It depends on the image and the query: ${range}.`;
  return beside < 0.1 || !others.length ? text : `${text} ${percent(beside)} goes to ${listed(others)}.`;
}

const whole = (at, number) => Number.isInteger(at) ? at : number;  // a query of pooled keys is between their rows
const place = ({row, column}) => `(${row}, ${column})`;
const spoken = ({row, column, i, j, name}) => name ? `token ${name}` : `row ${whole(row, i)}, column ${whole(column, j)}`;
const listed = (names) => names.length < 3 ? names.join(' and ') : `${names[0]} … ${names[names.length - 1]}`;
const titleOf = ({label}) => label.replace(/^[bs](?=\w+ \d)/, (first) => first.toUpperCase());
const nameOf = (layer, head) => `${titleOf(page.layers[layer])}, head ${head}`;

/** A number with as many digits as its error leaves, four at most. */
function number(value, error = 0) {
  if (value === 0) return '0';
  const left = Math.floor(Math.log10(value)) + 1 + Math.ceil(-Math.log10(error)), digits = clamp(left - 1, 4) + 1;
  return value >= 0.001 ? String(Number(value.toPrecision(digits))) : value.toExponential(digits - 1).replace('-', '−');
}

/** A probability of a query whose largest one is given; it is stored as a byte of its square root. */
const probability = (p, most) => number(p, Math.sqrt(p * most) / 255);

function shift(pair) {
  const signed = (x) => (Math.abs(x) < 0.005 ? '' : x < 0 ? '−' : '+') + Math.abs(x).toFixed(2);
  return pair ? `(${pair.map(signed).join(', ')})` : '–';
}

// ---- Drawing ----

const scratch = document.createElement('canvas');
let pictures, faded;  // of the images; the latter by theme

function pictureCanvas({shape: [rows, columns], values}, change = (rgb) => rgb) {
  const canvas = create('canvas', {width: columns, height: rows}), image = new ImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) image.data.set([...change(values.subarray(3 * i, 3 * i + 3)), 255], 4 * i);
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

/** Its grey and faint picture, as light as a theme: --ground is the middle. */
const fadedCanvas = (picture, light) => pictureCanvas(
  picture, ([r, g, b]) => Array(3).fill((0.299 * r + 0.587 * g + 0.114 * b) * 0.15 + light));

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Gives a canvas the screen's own pixels. */
function fit(canvas, wide = canvas.clientWidth) {
  const w = Math.max(Math.round(wide * devicePixelRatio), width), h = Math.max(Math.round(w * height / width), height);
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, {width: w, height: h});
}

function drawPicture(context, picture) {
  const {width: w, height: h} = context.canvas;
  context.imageSmoothingEnabled = picture.width > w;  // pixels as squares where there are few of them
  context.drawImage(picture, 0, 0, w, h);
}

/** The colours of the theme, from a tenth to a hundred times uniform attention: 256 × RGBA. */
function colours() {
  const context = Object.assign(scratch, {width: 256, height: 1}).getContext('2d', {willReadFrequently: true});
  context.fillStyle = context.createLinearGradient(0.5, 0, 255.5, 0);
  for (const stop of color('--attention').split(',')) {
    const [rgb, at] = stop.trim().split(' ');
    context.fillStyle.addColorStop(parseFloat(at) / 100, rgb);
  }
  context.fillRect(0, 0, 256, 1);
  return context.getImageData(0, 0, 256, 1).data;
}

/** The colour of a probability, by what it is times uniform attention, or from 0 to the largest. */
function colourOf(p, {most, seen}, ramp) {
  const uniform = 1 / 3, times = Math.log10(p * seen);
  const at = state.scale === 'own' ? uniform + (1 - uniform) * (most > 0 ? p / most : 0) : (times + 1) / 3;
  const first = 4 * Math.round(255 * clamp(at, 2));
  return ramp.subarray(first, first + 4);
}

/** The map of a head over its picture, with the query that it is of. */
function drawMap(context, layer, shown, ramp) {
  const {probs, query} = shown, theme = document.documentElement.dataset.theme;
  const {grid: [tall, wide]} = layer, image = new ImageData(wide, tall), keys = windowOf(layer, query);
  drawPicture(context, faded[theme][state.image]);
  for (const k of keys ?? probs.keys()) if (k < probs.length) image.data.set(colourOf(probs[k], shown, ramp), 4 * k);
  Object.assign(scratch, {width: wide, height: tall}).getContext('2d').putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.globalCompositeOperation = theme === 'dark' ? 'screen' : 'multiply';  // uniform attention leaves the picture
  context.drawImage(scratch, 0, 0, context.canvas.width, context.canvas.height);
  context.globalCompositeOperation = 'source-over';
  drawQuery(context, layer, query);
}

/** The outline of a query that has a place, and that of the keys that it sees in its window. */
function drawQuery(context, layer, query) {
  const keys = windowOf(layer, query), {grid: [tall, wide]} = layer;
  if (keys) drawWindow(context, new Set(keys.filter((key) => key < tall * wide)), layer.grid);
  if (!query.name) drawPixel(context, query, layer.grid);
}

function drawWindow(context, inside, [tall, wide]) {
  const w = context.canvas.width / wide, h = context.canvas.height / tall, line = 2 * devicePixelRatio;
  context.fillStyle = color('--accent');
  for (const key of inside) {
    const column = key % wide, left = column * w, top = Math.floor(key / wide) * h;  // on the inner side of the edges
    if (!inside.has(key - wide)) context.fillRect(left, top, w, line);
    if (!inside.has(key + wide)) context.fillRect(left, top + h - line, w, line);
    if (column === 0 || !inside.has(key - 1)) context.fillRect(left, top, line, h);
    if (column === wide - 1 || !inside.has(key + 1)) context.fillRect(left + w - line, top, line, h);
  }
}

/** The outline of a pixel inside of it, with a halo inside of that so that it stands out of every picture. */
function drawPixel(context, {row, column}, [tall, wide], dash = []) {
  const {width: w, height: h} = context.canvas;
  const edges = (at, size, count) => [Math.round(at * size / count), Math.round((at + 1) * size / count)];
  const [left, right] = edges(column, w, wide), [top, bottom] = edges(row, h, tall);
  const size = Math.min(right - left, bottom - top);
  const line = Math.min(Math.max(Math.round(size / 10), 1), 2 * devicePixelRatio);
  const strokes = [[color('--halo'), 2 * line, []], [color('--query'), line, dash]];
  for (const [strokeStyle, lineWidth, pattern] of size < 8 * line ? strokes.slice(1) : strokes) {
    Object.assign(context, {strokeStyle, lineWidth}).setLineDash(pattern.map((length) => length * devicePixelRatio));
    context.strokeRect(left + lineWidth / 2, top + lineWidth / 2, right - left - lineWidth, bottom - top - lineWidth);
  }
  context.setLineDash([]);
}

function drawCenter(context, query, center, [tall, wide]) {
  const w = context.canvas.width / wide, h = context.canvas.height / tall, dot = devicePixelRatio;
  const radius = Math.min(Math.max(4 * dot, Math.min(w, h) * 0.3), 7 * dot);
  for (const [strokeStyle, lineWidth] of [[color('--halo'), 4 * dot], [color('--center'), 2 * dot]]) {
    Object.assign(context, {strokeStyle, lineWidth}).beginPath();
    context.arc((query.column + center[1] + 0.5) * w, (query.row + center[0] + 0.5) * h, radius, 0, 2 * Math.PI);
    context.stroke();
  }
}

// ---- Elements ----

let cells = [];  // by layer and head: {button, canvas, context, caption}

function create(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const wideText = (text) => create('span', {className: 'wide'}, text);

function buildTable() {
  const table = byId('maps'), heads = Math.max(...page.layers.map((layer) => layer.heads));
  const titles = Array.from({length: heads}, (_, h) => create('th', {scope: 'col'}, wideText('Head '), String(h)));
  table.createTHead().insertRow().append(create('td'), ...titles);
  table.classList.toggle('named', page.layers.some((layer) => !/^block \d+$/.test(layer.label)));
  table.style.minWidth = `${heads * (matchMedia('(pointer: coarse)').matches ? 48 : 32) + 24}px`;
  table.style.maxWidth = `calc(4.2rem + ${heads * Math.max(160 * Math.min(width / height, 1) + 12, 56)}px)`;
  const body = table.createTBody();
  cells = page.layers.map((layer, l) => {
    const [, block, rest] = /^(block )?(.*)$/.exec(layer.label), row = body.insertRow();
    const label = [wideText(block ? 'Block ' : ''), rest.replaceAll('.', '.\u200b')];  // where a line may end
    row.append(create('th', {scope: 'row', title: layer.name}, ...label));
    return Array.from({length: layer.heads}, (_, h) => {
      const canvas = create('canvas'), caption = wideText('');
      const button = create('button', {type: 'button', tabIndex: -1}, canvas, caption);
      canvas.style.aspectRatio = width / height;
      button.addEventListener('click', () => change({layer: l, head: h}));
      row.insertCell().append(button);
      return {button, canvas, context: canvas.getContext('2d'), caption};
    });
  });
}

/** Buttons and swatches of the tokens beside the grid, of the layer that has most of them. */
function buildTokens() {
  const names = page.layers.map(({others}) => others).reduce((a, b) => b.length > a.length ? b : a);
  names.forEach((name, i) => {
    const button = create('button', {type: 'button', ariaLabel: `Query: token ${name}`}, name);
    // A second click goes back to the pixel, as one on a pixel frees it.
    button.addEventListener('click', () => change(
      state.token === i ? {token: null, locked: false} : {token: i, locked: true}));
    byId('query-tokens').append(button);
    byId('map-tokens').append(
      create('li', {}, create('i', {className: 'swatch'}), create('span', {}, name), create('strong')));
  });
  for (const element of document.querySelectorAll('.beside')) element.classList.toggle('has-tokens', names.length > 0);
  for (const id of ['query-tokens', 'map-tokens']) byId(id).hidden = names.length === 0;
}

/** The choice of an image or a part. */
function addChoice(id, name, value, label, content, title = label) {
  const input = create('input', {type: 'radio', name, value, ariaLabel: label});
  input.addEventListener('change', () => change({[name]: value}));
  byId(id).append(create('label', {title}, input, content));
}

/** Goes some layers down and some heads to the right. */
function choose(down, right) {
  const layer = state.layer + down;
  if (cells[layer]) change({layer, head: clamp(state.head + right, cells[layer].length)});
}

// ---- Rendering ----

function render() {
  const ramp = colours();
  const wide = cells.flat()[0].canvas.clientWidth;  // all are as wide
  const all = page.layers.map((layer, l) => {
    const query = shownQuery(l);
    return Array.from({length: layer.heads}, (_, h) => shownOf(layer, h, query));
  });
  all.forEach((heads, l) => heads.forEach((shown, h) => {
    const {canvas, context, button, caption} = cells[l][h], chosen = l === state.layer && h === state.head;
    button.setAttribute('aria-pressed', String(chosen));
    button.tabIndex = chosen ? 0 : -1;
    fit(canvas, wide);
    drawMap(context, page.layers[l], shown, ramp);
    caption.textContent = Number(shown.most.toPrecision(2));
    button.setAttribute('aria-label',
      `${nameOf(l, h)}: largest probability ${number(shown.most)} at ${spoken(shown.largest)}`);
  }));
  const heads = all[state.layer], shown = heads[state.head];
  renderQuery(shown.center);
  renderTokens(shown, ramp);
  setText('says', sentence(state.layer, state.head));
  renderMap(shown, ramp);
  renderNumbers(shown);
  renderCenters(heads);
  for (const input of document.querySelectorAll('input[type=radio]')) {
    input.checked = input.value === String(state[input.name]);
  }
  settle();
}

/** Sets a text where it changes: a live region is read again with each one that is set. */
function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

/** Names an element that has not the focus: of one that has it, the live region tells what changes. */
function name(element, label) {
  if (document.activeElement !== element) element.setAttribute('aria-label', label);
}

function renderQuery(center) {
  const canvas = byId('query'), context = canvas.getContext('2d'), layer = page.layers[state.layer];
  const query = shownQuery(state.layer), picture = page.names[state.image];
  fit(canvas);
  drawPicture(context, pictures[state.image]);
  drawQuery(context, layer, query);
  if (center) drawCenter(context, query, center, layer.grid);
  byId('query-place').textContent = query.name ? `Token ${query.name}` : spoken(query).replace('row', 'Row');
  byId('lock').setAttribute('aria-pressed', String(state.locked));
  byId('lock').textContent = state.locked ? 'Locked' : 'Lock';
  byId('image-name').textContent = picture;
  name(canvas, `${picture}, query ${query.name ? '' : 'at '}${spoken(query)}${state.locked ? ', locked' : ''}`);
}

function renderTokens(shown, ramp) {
  const {others} = page.layers[state.layer];
  [...byId('query-tokens').children].forEach((button, i) => {
    button.disabled = i >= others.length;
    button.setAttribute('aria-pressed', String(i === state.token && !button.disabled));
  });
  [...byId('map-tokens').children].forEach((item, i) => {
    const [swatch, , text] = item.children, p = shown.beside[i] ?? 0;
    item.hidden = i >= others.length;
    item.classList.toggle('query', i === shown.query.number);
    swatch.style.backgroundColor = `rgb(${colourOf(p, shown, ramp).subarray(0, 3).join(' ')})`;
    text.textContent = number(p, p / 100);  // 3 digits
  });
}

function renderMap(shown, ramp) {
  const canvas = byId('map'), context = canvas.getContext('2d'), title = nameOf(state.layer, state.head);
  const layer = page.layers[state.layer], {grid, rows, columns, keys} = layer, {query} = shown;
  const key = keyOf(state.layer), text = probability(shown.probs[key.index], shown.most);
  fit(canvas);
  drawMap(context, layer, shown, ramp);
  if (state.key !== null || query.name) drawPixel(context, key, grid, [4, 3]);
  if (shown.center) drawCenter(context, query, shown.center, grid);
  byId('map-title').textContent = title;
  byId('grid').textContent =
    `${grid.join('×')} tokens, ${rows.length}×${columns.length} queries` +
    (keys ? `, in windows of ${keys.shape[1]}. What the query sees is outlined.` : '.') +
    (layer.least < 0 ? ` Weights below 0, down to ${layer.least.toPrecision(2)}, count as 0: heads are mixed.` : '');
  const own = state.scale === 'own';
  byId('ramp').classList.toggle('own', own);
  byId('ramp-start').textContent = own ? '0' : '1/10×';
  byId('ramp-end').textContent = own ? number(shown.most) : '100×';
  byId('scale-help').textContent = own ? 'The strongest colour of a map is its largest probability.' :
    'No colour is uniform attention, the same for each key; orange to red is up to 100 times as much, blue is less.';
  byId('key-place').textContent = place(key);
  byId('key-probability').textContent = text;
  name(canvas, `${title}: where ${spoken(query)} attends, key at ${spoken(key)}: ${text}`);
}

function renderNumbers({largest, most, near, center, beside, rest}) {
  const {centers, others} = page.layers[state.layer], encoded = centers?.[state.head];
  const texts = {
    'largest-place': place(largest), 'largest': number(most), 'center': shift(center), 'encoded-center': shift(encoded),
    'near': near === null ? '–' : number(near, 3 * most / 255),  // √9 times that of one: they are not alike
    'total': beside.length ? number(Math.max(1 - rest, 0)) : '',
    'total-rest': others.length ? `The rest, ${number(rest)}, lies on ${listed(others)}, beside the image.` :
      'The rest lies outside.',
  };
  for (const [id, text] of Object.entries(texts)) byId(id).textContent = text;
  for (const element of document.querySelectorAll('.encoded')) element.hidden = !encoded;
  for (const element of document.querySelectorAll('.total')) element.hidden = !beside.length;
}

/** The centres of all heads of the chosen layer, as shifts from the query: rows down, columns right. */
function renderCenters(heads) {
  const svg = byId('centers'), {centers: encoded, grid, label} = page.layers[state.layer];
  const centers = heads.map((shown, h) => encoded ? encoded[h] : shown.center);
  const known = centers.filter(Boolean).flat().map(Math.abs);
  const reach = Math.min(Math.max(3, Math.ceil(Math.max(0, ...known) + 0.6)), Math.max(...grid));
  const inside = (x) => Math.min(Math.max(x, -reach), reach), edge = (reach + 0.5) * 1.12;
  const colors = color('--heads').split(' '), unit = edge / 10, grain = reach > 8 ? 4 : reach > 4 ? 2 : 1;
  const add = (parent, tag, attributes, text = '') => {
    const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    parent.append(element);
    return element;
  };
  svg.setAttribute('viewBox', `${-edge} ${-edge} ${2 * edge} ${2 * edge}`);
  svg.replaceChildren();
  for (let t = -reach + reach % grain; t <= reach; t += grain) {
    const line = {class: 'grid', 'stroke-width': t === 0 ? 0.16 * unit : 0.07 * unit};
    add(svg, 'line', {...line, x1: t, x2: t, y1: -reach, y2: reach});
    add(svg, 'line', {...line, x1: -reach, x2: reach, y1: t, y2: t});
    for (const [x, y] of [[t, edge - 0.45 * unit], [-edge + 0.8 * unit, t]]) {
      add(svg, 'text', {class: 'tick', x, y}, String(t).replace('-', '−')).style.fontSize = `${0.8 * unit}px`;
    }
  }
  add(svg, 'rect', {class: 'here', x: -0.5, y: -0.5, width: 1, height: 1, 'stroke-width': 0.2 * unit});
  // The chosen head comes last, above the others.
  for (const h of [...centers.keys()].sort((a, b) => (a === state.head) - (b === state.head))) {
    if (!centers[h]) continue;
    const [row, column] = centers[h], transform = `translate(${inside(column)} ${inside(row)})`;
    const group = add(svg, 'g', {class: h === state.head ? 'head chosen' : 'head', transform});
    const fill = colors[h % colors.length], bright = parseInt(fill.slice(3, 5), 16) > 140;  // green weighs most
    add(group, 'circle', {fill, r: (h === state.head ? 0.85 : 0.7) * unit, 'stroke-width': 0.2 * unit});
    add(group, 'text', {fill: bright ? 'black' : 'white'}, h).style.fontSize = `${0.85 * unit}px`;
    add(group, 'title', {}, `Head ${h}: ${shift(centers[h])}`);
    group.addEventListener('click', () => change({head: h}));
  }
  const token = heads[0].query.name;
  byId('centers-title').textContent = `Centres of ${label}`;
  byId('centers-help').textContent = token ? `The ${token} token has no place.` :
    (encoded ? 'The learned centre Δ of each head' : 'The mean shift of each head, from this query') +
    ', in tokens: rows down and columns right. The square is the query.' +
    (known.some((x) => x > reach) ? ' Those at the edge lie beyond it.' : '');
  name(svg, `Centres of ${label}, rows down and columns right: ` +
    centers.map((center, h) => `head ${h} ${shift(center)}`).join('; '));
}

// ---- State ----

let frame = null, settling = null;

function change(changes) {
  Object.assign(state, changes);
  applyTheme();
  state.head = Math.min(state.head, page.layers[state.layer].heads - 1);
  frame ??= requestAnimationFrame(() => {
    frame = null;
    render();
  });
}

/** Moves the query over the image, row by row, or stops that. */
let playing = null;
function play(start = playing === null) {
  clearInterval(playing);
  playing = start ? setInterval(() => {
    const {grid, rows, columns} = page.layers[state.layer], {i, j} = queryOf(state.layer);
    const next = (i * columns.length + j + 1) % (rows.length * columns.length);
    const place = {row: rows[Math.floor(next / columns.length)], column: columns[next % columns.length]};
    change({query: onPage(place, grid), token: null, locked: true});
  }, 200) : null;
  byId('play').setAttribute('aria-pressed', String(start));
  byId('play').textContent = start ? 'Stop' : 'Play';
  change({});
}

/** What follows a change when no other one has come for a moment: what is read aloud, and the address. */
function settle() {
  clearTimeout(settling);
  settling = null;
  if (playing !== null) return;
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
  const pair = (pixel) => pixel === null ? null : `${rowOf(pixel)},${columnOf(pixel)}`;
  const {image, query, layer, head, part, scale, token, locked, key, theme} = state;
  const named = {
    image, query: pair(query), layer, head, part, scale: scale === 'own' ? scale : null, token,
    locked: locked ? 1 : null, key: pair(key), theme};
  return `#${Object.entries(named).filter(([, value]) => value !== null).map((entry) => entry.join('=')).join('&')}`;
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
  const among = (name, values) => {
    if (values.includes(given.get(name))) changes[name] = given.get(name);
  };
  index('token', Math.max(...page.layers.map(({others}) => others.length)));
  index('image', page.names.length);
  index('layer', page.layers.length);
  index('head', page.layers[changes.layer ?? state.layer].heads);
  pair('query');
  pair('key');
  among('part', allParts());
  among('scale', ['same', 'own']);
  among('theme', ['light', 'dark']);
  change(changes);
}

/** The parts of the layers that have most of them. */
const allParts = () => page.layers.map(({parts}) => Object.keys(parts)).reduce((a, b) => b.length > a.length ? b : a);

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

/** Calls back with the rows and the columns of an arrow key, or without them with any other key. */
function onKey(element, withArrow, withOther = () => {}) {
  element.addEventListener('keydown', (event) => {
    if (!ARROWS[event.key]) return withOther(event);
    event.preventDefault();
    withArrow(ARROWS[event.key]);
  });
}

/** The next query of the chosen layer, and the next key, on the page's grid. */
function movedQuery([down, right]) {
  const {grid, rows, columns} = page.layers[state.layer], {i, j} = queryOf(state.layer);
  return onPage({row: rows[clamp(i + down, rows.length)], column: columns[clamp(j + right, columns.length)]}, grid);
}

function movedKey([down, right]) {
  const {grid} = page.layers[state.layer], {row, column} = keyOf(state.layer);
  return onPage({row: clamp(row + down, grid[0]), column: clamp(column + right, grid[1])}, grid);
}

function listen() {
  const query = byId('query'), map = byId('map');
  let held = null;  // the pixel that was locked when the pointer came down
  const sameQuery = (pixel) =>
    held !== null && queryOf(state.layer, held).number === queryOf(state.layer, pixel).number;
  const chooseQuery = (event) => {
    const pixel = pixelAt(query, event);
    change({query: pixel, token: null, locked: !sameQuery(pixel)});
  };
  const chooseKey = (event) => change({key: pixelAt(map, event)});
  query.addEventListener('pointerdown', () => {
    play(false);
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
  map.addEventListener('pointermove', (event) => {
    if (event.pointerType !== 'touch') chooseKey(event);
  });
  // Chromium sends no click for some taps that come after a drawn finger. Where it does, it chooses the same once more.
  for (const [canvas, choose] of [[query, chooseQuery], [map, chooseKey]]) {
    canvas.addEventListener('click', choose);
    canvas.addEventListener('pointerup', (event) => {
      if (event.pointerType === 'touch') choose(event);
    });
  }
  // Locked, so that a pointer that rests on the image does not move it back.
  onKey(query, (arrow) => change({query: movedQuery(arrow), token: null, locked: true}), (event) => {
    if (event.key === 'Escape') {
      play(false);
      change({locked: false});
    }
    if (event.key !== 'Enter' && event.key !== ' ') return;
    event.preventDefault();
    change({locked: !state.locked});
  });
  onKey(map, (arrow) => change({key: movedKey(arrow)}), (event) => {
    if (event.key === 'Escape') change({key: null});
  });
  onKey(byId('maps'), (arrow) => {
    choose(...arrow);
    cells[state.layer][state.head].button.focus();
  });
  onKey(byId('centers'), ([down, right]) => choose(0, down + right));
  byId('play').addEventListener('click', () => play());
  byId('lock').addEventListener('click', () => change({locked: !state.locked}));
  for (const id of ['query', 'map', 'centers']) byId(id).addEventListener('blur', () => change({}));
  for (const id of ['query', 'maps']) new ResizeObserver(() => change({})).observe(byId(id));
  byId('theme').addEventListener('click', () =>
    change({theme: document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'}));
  prefersDark.addEventListener('change', () => change({}));
  addEventListener('hashchange', fromAddress);
}

// ---- Start ----

async function start() {
  if (typeof DecompressionStream === 'undefined') throw new Error('this browser is too old for this page');
  page = await unpack(JSON.parse(byId('data').textContent));
  byId('data').remove();
  [height, width] = page.grid;
  pictures = page.pictures.map((picture) => pictureCanvas(picture));
  const fadedIn = (light) => page.pictures.map((picture) => fadedCanvas(picture, light));
  faded = {light: fadedIn(217), dark: fadedIn(15)};
  pictures.forEach((picture, i) => addChoice('images', 'image', i, page.names[i], picture));
  const parts = allParts();
  for (const part of parts) addChoice('parts', 'part', part, PART_NAMES[part], PART_NAMES[part], PART_TITLES[part]);
  byId('parts').hidden = parts.length < 2;
  for (const [scale, text] of Object.entries(SCALE_NAMES)) addChoice('scales', 'scale', scale, text, text);
  Object.assign(state, {
    part: parts[parts.length - 1], query: Math.floor(height / 2) * width + Math.floor(width / 2)});
  Object.assign(state, mostLocal());
  byId('left-out').textContent = page.leftOut.length ?
    `Not shown: ${page.leftOut.join(', ')}, whose queries or keys are not the patches of a grid.` : '';
  for (const id of ['query', 'map']) {
    byId(id).style.aspectRatio = width / height;
    byId(id).style.maxWidth = `${26 * width / height}rem`;  // at most 26rem high
  }
  byId('grid').hidden = page.layers.every(({grid, rows, columns, keys, least}) =>
    !keys && !(least < 0) && String([...grid, rows.length, columns.length]) === String([...page.grid, ...page.grid]));
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
