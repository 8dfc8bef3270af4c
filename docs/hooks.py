"""What the site takes from outside ``docs``, and formulas as MathML; mkdocs.yml names this file."""

import re
from html import unescape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FILES = {
    'README.md': 'index.md',
    'CHANGELOG.md': 'changelog.md',
    'CONTRIBUTING.md': 'contributing.md',
    'CITATION.cff': 'CITATION.cff',
    'LICENSE': 'LICENSE.txt',
}
PICTURE = re.compile(r'<picture>.*?srcset="(.*?)".*?alt="(.*?)" src="(.*?)".*?</picture>', re.DOTALL)


def on_files(files, config):
    """Adds the files of :data:`FILES`; their links lead to pages of the site."""
    for source, target in FILES.items():
        text = (ROOT / source).read_text().replace('"docs/', '"')
        files.append(File.generated(config, target, content=_links(text, 'docs/', '')))


def on_page_markdown(markdown, **_):
    """Makes links to the files of :data:`FILES` lead to their pages, and shows the picture of the palette."""
    return _links(PICTURE.sub(r'![\2](\3#only-light)![\2](\1#only-dark)', markdown), '', '../')


def on_page_content(html, **_):
    """Makes MathML of formulas, which all current browsers draw."""
    formula = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
    display = {'span': 'inline', 'div': 'block'}
    return formula.sub(lambda found: convert(unescape(found[2]), display=display[found[1]]), html)


def _links(markdown, inside, outside):
    """Rewrites links to files in ``inside`` as links to pages, and those to ``outside`` too."""
    markdown = markdown.replace(f']({inside}', '](') if inside else markdown
    for source, target in FILES.items():
        markdown = markdown.replace(f']({outside}{source}', f']({target}')
    return markdown
