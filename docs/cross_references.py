"""Cross-references of docstrings, ``:class:`~package.Name```, as links of the site; mkdocs.yml names this file."""

import re
from typing import Optional

import griffe

ROLE = re.compile(r':(?:class|func|meth|mod|attr):`(~?)([\w.]+)`')
logger = griffe.get_logger('cross_references')


class CrossReferences(griffe.Extension):
    """Finds the object of each cross-reference, as Sphinx does: from the place of the docstring outwards.

    One to an object that does not exist is a warning, which ends a strict build. One to an object without a page is
    shown as code.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        """Rewrites the docstrings of a package."""
        self._visit(pkg, pkg)

    def _visit(self, place: griffe.Object, package: griffe.Module) -> None:
        if place.docstring is not None:
            place.docstring.value = ROLE.sub(lambda role: _link(role, place, package), place.docstring.value)
        for member in place.members.values():
            if not member.is_alias:
                self._visit(member, package)


def _link(role: re.Match, place: griffe.Object, package: griffe.Module) -> str:
    short, target = role.groups()
    text = f'`{target.rpartition(".")[2] if short else target}`'
    if not target.startswith(f'{package.name}.') and '.' in target:
        return text  # of another library
    found = _find(target, place, package)
    if found is None:
        logger.warning(f'{place.path}: {role[0]} does not exist')
        return text
    return f'<autoref identifier="{found}" optional><code>{text.strip("`")}</code></autoref>'


def _find(target: str, place: Optional[griffe.Object], package: griffe.Module) -> Optional[str]:
    """The path of the object that a name stands for at a place in the package; None if there is none."""
    if target == package.name:
        return target
    if target.startswith(f'{package.name}.'):
        place, target = package, target[len(package.name) + 1 :]
    while place is not None:
        try:
            return place[target].canonical_path
        except (KeyError, griffe.AliasResolutionError):
            inherited = getattr(place, 'inherited_members', {}) if place.is_class else {}
            if target in inherited:
                return inherited[target].canonical_path
            place = place.parent
    return None
