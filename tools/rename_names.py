"""Rename functions, classes, attributes, parameters and variables of the library and of its tests.

Usage, in the root of the repository::

    python tools/rename_names.py --list branchlake_dagster.catalog > map.json   # what a map may contain
    python tools/rename_names.py --check map.json                               # report, write nothing
    python tools/rename_names.py map.json more.json                             # apply

Afterwards run ``ruff check --fix``, ``ruff format``, ``mypy`` and the tests.

A map is JSON: module -> {entry: new name}. Entries are the same whatever uses them::

    {"branchlake_dagster.changes.model": {
        "standing": "ingestion_progress",          a function, class, constant or alias of the module
        "Position.beyond": "unpublished_snapshots", a method, property or field; overrides follow
        "Position.beyond(floor)": "common_position", a parameter; keyword arguments and overrides follow
        "Position(start)": "first_snapshot",        a parameter of the constructor
        "standing.found": "stored_offsets",         a variable of a function, its lambdas and comprehensions
        "standing.inner.one": "candidate"}}         a variable of a function within a function

Resolved: names by Python's scopes; imports; attributes by mypy's type of their object; keyword arguments of
calls, constructors, ``functools.partial``, ``dataclasses.replace`` and ``_replace``; class patterns;
``getattr``, ``setattr``, ``monkeypatch.setattr`` and ``patch.object`` with a literal name; complete dotted
paths in any text; ``__all__`` and other tables of names in an ``__init__.py``; ``Class.attribute`` in any
text; names in backticks and lines of *Args* where the docstring's own scope knows the name.

Reported and left to the reader: objects without a type whose attribute has a renamed name (``Any``; applied
all the same if no other class that mypy has loaded has such an attribute, and then reported as *assumed*),
keyword arguments of unknown callees, ``**`` arguments, and mentions in strings, comments, documents and
templates. Values that are stored are not touched: a renamed field of a class that is serialised by field
names is reported, and so is a function whose decorator may read its name.

Nothing is written, and the exit code is 1, if an entry is not found, a new name is taken or would hide
another one, or an attribute belongs to a class of another library.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import keyword
import os
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path

from mypy import nodes, types
from name_scopes import Module, Scope, Symbol, span
from name_types import Program

PACKAGES = ("branchlake_dagster", "branchlake_dagster_tests")
TEXTS = ("docs/**/*.md", "*.md", "deploy/**/*", "branchlake_dagster/**/*.template", "docs/*.py")
OUT = frozenset(
    "told tell tells letters standing floor beyond mine theirs settle look place space said in_words "  # noqa: SIM905
    "text anchor hands aside found known kept made given taken there one it".split()
)
"""Words that names should no longer contain, and participles and pronouns; `--list` lists them."""

_HARMLESS = frozenset(
    "abstractmethod cache cached_property classmethod contextmanager asynccontextmanager dataclass final "  # noqa: SIM905
    "lru_cache overload override property setter staticmethod total_ordering wraps runtime_checkable".split()
)
"""Decorators that do not read names of functions or parameters."""
_WITH_NAME = {"getattr", "setattr", "hasattr", "delattr", "object"}
_READS_FIELDS = {
    "asdict",
    "astuple",
    "fields",
    "vars",
    "_asdict",
    "model_dump",
    "TypeAdapter",
    "get_type_hints",
}
_FAKES = {"SimpleNamespace", "Mock", "MagicMock", "attrgetter", "methodcaller"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def distinct(name: str) -> bool:
    """Whether a name is recognised in prose, which a word like `items` is not."""
    return "_" in name or name != name.lower()


class Renaming:
    """Applies maps to a program: collects edits of files, conflicts, and what is left to the reader."""

    def __init__(self, program: Program, maps: dict[str, dict[str, str]]) -> None:
        self.program = program
        self.new: dict[Symbol, str] = {}
        self.entry: dict[Symbol, str] = {}
        self.uses: Counter[str] = Counter()
        self.edits: dict[Path, dict[int, tuple[str, str]]] = defaultdict(dict)
        self.conflicts: list[str] = []
        self.warnings: list[str] = []
        self.assumed: list[str] = []
        self.candidates: dict[tuple[str, int], str] = {}
        self.seen: set[tuple[Path, int]] = set()
        for module, entries in maps.items():
            for entry, new in entries.items():
                self.enter(module, entry, new)
        self.named: defaultdict[str, set[Symbol]] = defaultdict(set)
        for symbol in self.new:
            self.named[symbol.name].add(symbol)
        self.attributes = {s.name for s in self.new if self.kind(s) == "class"}
        self.globals = {s.name for s in self.new if self.kind(s) == "module"}
        self.keywords = {s.name for s in self.new if s.name in self.program.scopes[s.scope].parameters}
        self.keywords |= self.attributes
        self.mentioned = self.attributes | self.globals

    def run(self) -> None:
        """Find all uses and check the result. Writes nothing."""
        if self.conflicts:
            return
        for module in self.program.modules.values():
            self.names(module)
            self.members(module)
            self.called(module)
        self.doubles()
        self.taken()
        for module in self.program.modules.values():
            self.python_text(module)
            if module.path in self.edits:
                self.verify(module)
        self.documents()

    def write(self) -> None:
        """Change the files."""
        for path in self.edits:
            path.write_bytes(self.edited(path, path.read_bytes()))

    # Entries.

    def kind(self, symbol: Symbol) -> str:
        return self.program.scopes[symbol.scope].kind

    def enter(self, module: str, entry: str, new: str) -> None:
        label = f"{module}: {entry}"
        parsed = re.fullmatch(r"([\w.]+)(?:\((\w+)\))?", entry)
        if (
            module not in self.program.modules
            or parsed is None
            or not new.isidentifier()
            or keyword.iskeyword(new)
        ):
            self.conflicts.append(f"{label} -> {new}: no such module, or not names")
            return
        path = parsed[1].split(".")
        symbols = list(self.entered(self.program.modules[module].scope, path, parsed[2]))
        if not symbols:
            self.conflicts.append(f"{label}: not found (or imported from elsewhere, or inherited)")
        self.uses[label] = 0
        for symbol in symbols:
            for each in self.together(symbol, label):
                if self.new.setdefault(each, new) != new:
                    self.conflicts.append(f"{label} -> {new}: is also to become {self.new[each]}")
                self.entry.setdefault(each, label)

    def entered(self, outer: Scope, path: list[str], parameter: str | None) -> Iterator[Symbol]:
        scopes = [outer]
        for part in path if parameter else path[:-1]:
            scopes = [child for scope in scopes for child in scope.children if child.name == part]
        name = parameter or path[-1]
        for scope in scopes:
            info = self.program.classes.get(scope.id)
            if scope.kind == "class" and parameter:
                made = [child for child in scope.children if child.name in {"__init__", "__new__"}]
                fields = [scope] if not made and name in scope.names else []
                yield from (Symbol(each.id, name) for each in fields or made if name in each.names)
            elif (
                (name in scope.names or (info and name in info.names))
                and (not parameter or name in scope.parameters)
                and (name not in scope.imports or name in scope.aliased)
            ):
                yield Symbol(scope.id, name)
            if scope.kind != "class" and not parameter and name not in scope.names:
                yield from self.inner(scope, name)

    def inner(self, scope: Scope, name: str) -> Iterator[Symbol]:
        for child in scope.children:
            if child.kind in {"lambda", "comprehension"}:
                if name in child.names:
                    yield Symbol(child.id, name)
                yield from self.inner(child, name)

    def together(self, symbol: Symbol, label: str) -> Iterator[Symbol]:
        """The symbols that have to get the same name: overrides, and parameters of overrides."""
        scope = self.program.scopes[symbol.scope]
        method = scope.parent is not None and scope.parent.kind == "class" and not scope.name.startswith("__")
        notes: list[str] = []
        if scope.kind == "class" and scope.id in self.program.classes:
            if self.program.classes[scope.id].typeddict_type:
                self.conflicts.append(f"{label}: keys of a TypedDict are stored names")
            for info in self.program.group(symbol, notes):
                if info in self.program.ids:
                    yield Symbol(self.program.ids[info], symbol.name)
                else:
                    self.conflicts.append(
                        f"{label}: overrides {info.fullname}.{symbol.name} of another library"
                    )
            self.stored(scope, symbol, label)
        elif (
            method
            and symbol.name in scope.parameters
            and scope.parent
            and scope.parent.id in self.program.classes
        ):
            for info in self.program.group(Symbol(scope.parent.id, scope.name), notes):
                if info not in self.program.ids:
                    self.warnings.append(
                        f"{label}: overrides {info.fullname}.{scope.name} of another library"
                    )
                    continue
                for each in self.program.definitions(Symbol(self.program.ids[info], scope.name)):
                    if symbol.name in each.parameters:
                        yield Symbol(each.id, symbol.name)
        else:
            yield symbol
        self.warnings += [f"{label}: {note}" for note in notes]
        readers = self.program.definitions(symbol) or ([scope] if symbol.name in scope.parameters else [])
        for each in readers:
            for decorator in getattr(each.node, "decorator_list", []):
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                text = ast.unparse(called)
                if text.rpartition(".")[2] not in _HARMLESS:
                    self.warnings.append(f"{label}: @{text} may read or store this name")

    def doubles(self) -> None:
        """Report unrelated classes of other packages with a renamed attribute: fakes, perhaps."""
        homes = {symbol.scope.partition(".")[0].partition(":")[0] for symbol in self.new}
        for key in self.program.ids.values():
            scope = self.program.scopes[key]
            for name in self.attributes & scope.names if key.partition(".")[0] not in homes else ():
                if Symbol(key, name) not in self.new:
                    use = next(use for use in scope.module.uses if use.scope is scope and use.name == name)
                    self.candidate(scope.module.path, scope.module.source, use.offset, f"{scope.name}.{name}")

    def stored(self, scope: Scope, symbol: Symbol, label: str) -> None:
        info = self.program.classes[scope.id]
        bases = {base.fullname for base in info.mro}
        definition = symbol.name in scope.names and not self.program.definitions(symbol)
        if definition and "pydantic.main.BaseModel" in bases:
            self.warnings.append(f"{label}: a field of a pydantic model; give it an alias")
        if definition and info.is_enum:
            self.warnings.append(
                f"{label}: a member of an enumeration; its value must be written out, and `.name` changes"
            )

    # Uses.

    def edit(self, path: Path, offset: int, old: str, symbol: Symbol) -> None:
        self.seen.add((path, offset))
        if offset not in self.edits[path]:
            self.edits[path][offset] = (old, self.new[symbol])
            self.uses[self.entry[symbol]] += 1

    def where(self, module: Module, offset: int) -> str:
        return f"{module.path.relative_to(self.program.root)}:{module.line(offset)}"

    def candidate(self, path: Path, source: bytes, offset: int, why: str) -> None:
        if (path, offset) in self.seen:
            return
        number = source.count(b"\n", 0, offset) + 1
        text = source.splitlines()[number - 1].decode().strip()
        self.candidates.setdefault((str(path.relative_to(self.program.root)), number), f"[{why}] {text}")

    def names(self, module: Module) -> None:
        for use in module.uses:
            if use.name in self.named:
                binder = use.scope.binder(use.name)
                symbol = self.program.lookup(use.name, use.scope)
                if binder and use.name in binder.aliased:
                    symbol = Symbol(binder.id, use.name)
                if isinstance(symbol, Symbol) and symbol in self.new and symbol.name == use.name:
                    self.edit(module.path, use.offset, use.name, symbol)
        for offset, name, source, _ in module.imported:
            symbol = self.program.canonical(source, name)
            if isinstance(symbol, Symbol) and symbol in self.new and symbol.name == name:
                self.edit(module.path, offset, name, symbol)

    def choose(self, module: Module, offset: int, name: str, node: ast.expr, scope: Scope) -> None:
        """Rename an attribute if all classes that it may belong to agree."""
        owners = self.program.owners_of(node, scope, name)
        of = types.get_proper_type(self.program.types[module.name].get(span(node)))
        ids = self.program.ids
        symbols = {Symbol(ids[owner], name) if owner in ids else None for owner in owners.classes}
        news = {self.new.get(symbol) if symbol else None for symbol in symbols}
        self.seen.add((module.path, offset))
        if len(news) > 1:
            names = sorted(owner.fullname for owner in owners.classes)
            self.conflicts.append(
                f"{self.where(module, offset)}: {name} is of one of {names}; rename all or none"
            )
        elif news and news != {None}:
            self.edit(module.path, offset, name, next(symbol for symbol in symbols if symbol))
        elif owners.unknown and not symbols:
            self.seen.discard((module.path, offset))
            known = {s for s in self.named[name] if self.kind(s) == "class"}
            modules = isinstance(of, types.Instance) and of.type.fullname == "types.ModuleType"
            if not known and not modules:
                return
            if (
                known
                and len({self.new[s] for s in known}) == 1
                and name not in self.globals
                and self.alone(name)
            ):
                self.edit(module.path, offset, name, next(iter(known)))
                self.assumed.append(f"{self.where(module, offset)}: {name}")
            else:
                self.candidate(module.path, module.source, offset, name)

    def alone(self, name: str) -> bool:
        """Whether no class but the renamed ones has an attribute of this name."""
        if not hasattr(self, "_known"):
            self._known: defaultdict[str, set[str]] = defaultdict(set)
            tables = [tree.names for tree in self.program.loaded.values()]
            while tables:
                for node in list(tables.pop().values()):
                    if isinstance(node.node, nodes.TypeInfo) and node.node.fullname not in self._known[""]:
                        self._known[""].add(node.node.fullname)
                        tables.append(node.node.names)
                        for each in self.attributes & node.node.names.keys():
                            self._known[each].add(node.node.fullname)
        return self._known[name] <= {
            self.program.classes[s.scope].fullname
            for s in self.named[name]
            if s.scope in self.program.classes
        }

    def members(self, module: Module) -> None:
        for node, scope in module.attributes:
            if node.attr not in self.attributes and node.attr not in self.globals:
                continue
            offset = module.offset(node.end_lineno or 0, node.end_col_offset or 0) - len(node.attr.encode())
            self.member(module, offset, node.attr, node.value, scope)
        for pattern, scope in module.patterns:
            for name, inner in zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True):
                if name in self.attributes:
                    start = module.offset(inner.lineno, inner.col_offset)
                    self.member(
                        module, module.source.rindex(name.encode(), 0, start), name, pattern.cls, scope
                    )

    def member(self, module: Module, offset: int, name: str, node: ast.expr, scope: Scope) -> None:
        whole = self.program.value(node, scope)
        symbol = self.program.value(ast.Attribute(node, name), scope)
        if isinstance(symbol, Symbol):
            if symbol in self.new and symbol.name == name:
                self.edit(module.path, offset, name, symbol)
            self.seen.add((module.path, offset))
        elif isinstance(whole, str):
            self.seen.add((module.path, offset))
        else:
            self.choose(module, offset, name, node, scope)

    def called(self, module: Module) -> None:
        for call, scope in module.calls:
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            for part in call.keywords:
                if part.arg in self.keywords:
                    offset = module.offset(part.lineno, part.col_offset)
                    symbols = self.program.arguments(call, scope, part.arg)
                    news = {self.new.get(symbol) for symbol in symbols or ()}
                    if symbols is None:
                        self.candidate(module.path, module.source, offset, f"{part.arg}=")
                    elif len(news) > 1:
                        self.conflicts.append(
                            f"{self.where(module, offset)}: {part.arg}= is of several functions"
                        )
                    elif news and news != {None}:
                        self.edit(module.path, offset, part.arg, symbols[0])
                elif part.arg is None and not isinstance(part.value, ast.Dict):
                    for name in self.keywords:
                        if any(s in self.new for s in self.program.arguments(call, scope, name) or ()):
                            self.candidate(
                                module.path,
                                module.source,
                                module.offset(call.lineno, call.col_offset),
                                f"**, {name}",
                            )
            if called in _WITH_NAME and len(call.args) > 1:
                self.literal(module, call.args[0], call.args[1], scope)
            if called in _FAKES:
                pairs: list[tuple[ast.expr | ast.keyword, object]] = [
                    (each, each.arg) for each in call.keywords
                ]
                pairs += [(each, each.value) for each in call.args if isinstance(each, ast.Constant)]
                for node, fake in pairs:
                    if fake in self.attributes:
                        offset = module.offset(node.lineno, node.col_offset)
                        self.candidate(module.path, module.source, offset, called)
            if called in _READS_FIELDS:
                self.serialised(module, call, scope)

        for several, scope in module.tuples:  # arguments for patch.object, as a rule
            if len(several.elts) > 1 and isinstance(several.elts[0], ast.Name | ast.Attribute):
                self.literal(module, several.elts[0], several.elts[1], scope)

    def literal(self, module: Module, of: ast.expr, literal: ast.expr, scope: Scope) -> None:
        """Rename an attribute that is named by a string."""
        if isinstance(literal, ast.Constant) and literal.value in self.mentioned:
            offset = module.offset(literal.lineno, literal.col_offset) + 1
            if module.source[offset:].startswith(str(literal.value).encode()):
                self.member(module, offset, str(literal.value), of, scope)

    def serialised(self, module: Module, call: ast.Call, scope: Scope) -> None:
        parts = [call.func.value] if isinstance(call.func, ast.Attribute) and not call.args else call.args[:1]
        for part in parts:
            for name in self.attributes:
                for owner in self.program.owners_of(part, scope, name).classes:
                    symbol = Symbol(self.program.ids.get(owner, ""), name)
                    if symbol in self.new and not self.program.definitions(symbol):
                        offset = module.offset(call.lineno, call.col_offset)
                        self.warnings.append(
                            f"{self.where(module, offset)}: {ast.unparse(call)} reads field {name}"
                        )

    # Conflicts.

    def taken(self) -> None:
        for symbol, new in self.new.items():
            label = f"{self.entry[symbol]} -> {new}"
            if self.kind(symbol) != "class":
                outer = self.program.scopes[symbol.scope].binder(new)
                if outer and outer.id != symbol.scope and new in outer.imports:
                    self.conflicts.append(f"{label}: hides an import")
                if hasattr(builtins, new):
                    self.conflicts.append(f"{label}: hides a builtin")
                if f"{symbol.scope}.{new}" in self.program.modules:
                    self.conflicts.append(f"{label}: is also a module")
                continue
            own = self.program.classes.get(symbol.scope)
            for info in self.program.ids if own else ():
                if own in info.mro and self.program.own(own, symbol.name):
                    for owner in self.program.owners_in(info, new):
                        if Symbol(self.program.ids.get(owner, ""), new) not in self.new:
                            self.conflicts.append(f"{label}: {owner.fullname} has that name already")

    def edited(self, path: Path, source: bytes) -> bytes:
        for offset, (old, new) in sorted(self.edits[path].items(), reverse=True):
            end = offset + len(old.encode())
            if source[offset:end] != old.encode():
                raise RuntimeError(f"{path}:{source.count(chr(10).encode(), 0, offset) + 1}: not {old}")
            source = source[:offset] + new.encode() + source[end:]
        return source

    def verify(self, module: Module) -> None:
        """Whether each name still stands for what it stood for, by analysing the edited file."""
        source = self.edited(module.path, module.source)
        try:
            compile(source, str(module.path), "exec", dont_inherit=True)
        except SyntaxError as error:
            self.conflicts.append(f"{module.path.relative_to(self.program.root)}:{error.lineno}: {error.msg}")
            return
        after = Module(module.name, module.path, source)
        old, new = list(module.scope.within()), list(after.scope.within())
        places = {scope: number for number, scope in enumerate(old)} | {s: n for n, s in enumerate(new)}
        for before, now in zip(old, new, strict=True):
            for name in now.names - before.names if len(now.names) < len(before.names) else ():
                self.conflicts.append(
                    f"{self.where(module, 0)}: {before.path or before.name} gets two names {name}"
                )
            if len(now.names) < len(before.names):
                twice = sorted({n for _, n in self.edits[module.path].values()} & before.names & now.names)
                self.conflicts.append(
                    f"{self.where(module, 0)}: {before.path or 'module'}: taken: {', '.join(twice)}"
                )
        for before_use, use in zip(module.uses, after.uses, strict=True):
            here, there = before_use.scope.binder(before_use.name), use.scope.binder(use.name)
            if (here and places[here]) != (there and places[there]):
                self.conflicts.append(
                    f"{self.where(module, before_use.offset)}: {use.name} would stand for something else here"
                )

    # Text.

    def python_text(self, module: Module) -> None:
        for token in tokenize.tokenize(BytesIO(module.source).readline):
            if token.type not in {tokenize.COMMENT, tokenize.STRING}:
                continue
            before = token.line[: token.start[1]]
            start = module.starts[token.start[0] - 1] + len(before.encode())
            scope = self.at_line(module, token.start[0])
            docstring = not before.strip() and token.string.lstrip("rR").startswith('"""')
            prose = token.type == tokenize.COMMENT or docstring
            self.text(module.path, module.source, start, token.string, scope, prose)
            value = token.string.strip("rbRB").strip("\"'").rpartition(".")[2]
            if token.type == tokenize.STRING and value in self.mentioned:
                offset = start + len(token.string[: token.string.rindex(value)].encode())
                self.table(module, offset, value, scope)
                if distinct(value) or f".{value}" in token.string:
                    self.candidate(module.path, module.source, offset, f'"{value}"')

    def table(self, module: Module, offset: int, name: str, scope: Scope) -> None:
        """Rename a string in an `__init__.py` or in `__all__` that is a name which the module offers."""
        symbol = self.program.lookup(name, scope)
        offers = module.path.name == "__init__.py" or self.in_all(module, offset)
        if offers and scope.kind == "module" and isinstance(symbol, Symbol) and symbol in self.new:
            self.edit(module.path, offset, name, symbol)

    def in_all(self, module: Module, offset: int) -> bool:
        line = module.line(offset)
        return any(
            isinstance(each, ast.Assign)
            and ast.unparse(each.targets[0]) == "__all__"
            and each.lineno <= line <= (each.end_lineno or 0)
            for each in module.tree.body
        )

    def at_line(self, module: Module, line: int) -> Scope:
        scope = module.scope
        while inner := [
            child
            for child in scope.children
            if child.kind in {"class", "function"} and child.node.lineno <= line <= child.node.end_lineno  # type: ignore[attr-defined]
        ]:
            scope = inner[0]
        return scope

    def text(
        self, path: Path, source: bytes, start: int, text: str, scope: Scope | None, prose: bool
    ) -> None:
        def place(index: int) -> int:
            return start + len(text[:index].encode())

        for found in re.finditer(rf"\b(?:{'|'.join(self.program.packages)})(?:[.:]\w+)+", text):
            self.dotted(path, place(found.start()), found[0])
        for found in re.finditer(r"(?<![\w.])([A-Z_]\w*)\.(\w+)", text) if prose else ():
            classes = self.classes_named(found[1], scope) if found[2] in self.attributes else []
            for each in classes if len(classes) == 1 else ():
                for member in self.program.attribute_of(each, found[2]):
                    if member in self.new:
                        self.edit(path, place(found.start(2)), found[2], member)
        if scope and prose:
            known = r"(?<!`)(`{1,2})(\w+)(?=(\([^`]*\))?`)|^[ \t]+(\*{0,2})(\w+)(?=(?: \(.*\))?: )"
            for found in re.finditer(known, text, re.MULTILINE):
                index, name = (2, found[2]) if found[2] else (5, found[5])
                symbol = self.visible(name, scope) if name in self.named else None
                if symbol is None or not (
                    index == 2 or self.kind(symbol) == "class" or name in scope.parameters
                ):
                    continue
                if symbol in self.new:
                    self.edit(path, place(found.start(index)), name, symbol)
                self.seen.add((path, place(found.start(index))))
        code = scope is not None and not prose
        if code and ("\n" not in text or text.lower().startswith(("f", "rf"))):
            return  # f-strings have been read as code
        for found in re.finditer(r"(?<=`)\w+|(?<=[\w)]\.)\w+|\w+(?=\()|\w*[_A-Z]\w*", text):
            name = found[0]
            if name in self.mentioned and (distinct(name) or not scope or path in self.edits):
                self.candidate(path, source, place(found.start()), name)

    def visible(self, name: str, scope: Scope) -> Symbol | None:
        """What a name in a docstring is: a name of its scope, or an attribute of its class."""
        symbol = self.program.lookup(name, scope)
        if isinstance(symbol, Symbol) and symbol.name == name:
            return symbol
        around = scope.enclosing("class")
        return next(self.program.attribute_of(around, name), None) if around and symbol is None else None

    def classes_named(self, name: str, scope: Scope | None) -> list[Scope]:
        symbol = self.program.lookup(name, scope) if scope else None
        known = self.program.definition(symbol) if isinstance(symbol, Symbol) else None
        return (
            [known]
            if known
            else [each for each in self.program.scopes.values() if each.kind == "class" and each.name == name]
        )

    def dotted(self, path: Path, start: int, text: str) -> None:
        """A complete path, `package.module.name.attribute` or `package.module:name`."""
        whole: Symbol | str | None = None
        for found in re.finditer(r"\w+", text):
            if whole is None:
                whole = found[0]
                continue
            if isinstance(whole, str):
                whole = self.program.canonical(whole, found[0])
            else:
                inner = self.program.definition(whole)
                whole = (
                    next(self.program.attribute_of(inner, found[0]), None)
                    if inner and inner.kind == "class"
                    else None
                )
            if whole is None:
                return
            if isinstance(whole, Symbol) and whole in self.new and whole.name == found[0]:
                self.edit(path, start + found.start(), found[0], whole)

    def documents(self) -> None:
        for path in sorted({path for pattern in TEXTS for path in self.program.root.glob(pattern)}):
            if path.is_file() and path.name not in {"CHANGELOG.md", "rename_names.py"}:
                try:
                    text = path.read_bytes().decode()
                except UnicodeDecodeError:
                    continue
                self.text(path, text.encode(), 0, text, None, True)


def listing(root: Path, package: str) -> str:
    """A skeleton of a map: what is one word on the level of a module, and names with words that are out."""
    program = Program(root, PACKAGES, root / "pyproject.toml")
    skeleton: dict[str, dict[str, str]] = {}
    for name, module in sorted(program.modules.items()):
        if name != package and not name.startswith(package + "."):
            continue
        entries: dict[str, str] = {}
        for scope in module.scope.within():
            if scope.kind in {"lambda", "comprehension"}:
                continue
            for each in sorted(scope.names - scope.imports.keys()):
                definitions = program.definitions(Symbol(scope.id, each))
                functions = [d for d in definitions if isinstance(d.node, _FUNCTIONS)]
                one = scope.kind == "module" and "_" not in each.strip("_") and functions
                if each.startswith("__") or not (one or OUT & set(re.findall("[a-z]+", each.lower()))):
                    continue
                entry = (
                    f"{scope.path}({each})" if each in scope.parameters else f"{scope.path}.{each}".strip(".")
                )
                first = next((use for use in module.uses if use.name == each and use.scope is scope), None)
                line = module.line(first.offset) if first else 0
                what = ""
                if definitions and isinstance(definitions[0].node, _FUNCTIONS | ast.ClassDef):
                    node = definitions[0].node
                    signature = ast.unparse(node.args) if isinstance(node, _FUNCTIONS) else ""
                    what = f" ({signature}) {(ast.get_docstring(node) or '').partition(chr(10))[0]}"
                entries[entry] = f"{module.path.relative_to(root)}:{line}{what}"
        if entries:
            skeleton[name] = entries
    return json.dumps(skeleton, indent=2, ensure_ascii=False)


def read_maps(paths: Iterable[Path]) -> dict[str, dict[str, str]]:
    """All maps as one. An empty new name means: not decided, keep."""
    maps: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for path in paths:
        for module, entries in json.loads(path.read_text()).items():
            maps[module] |= {entry: new for entry, new in entries.items() if new}
    return dict(maps)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("maps", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--list", metavar="PACKAGE", help="print a skeleton of a map")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument(
        "--package", action="append", help="packages to read, the library and its tests by default"
    )
    parser.add_argument("--config", type=Path, help="mypy's configuration, pyproject.toml by default")
    given = parser.parse_args(arguments)
    root = given.root.resolve()
    if given.list:
        print(listing(root, given.list))
        return 0
    maps = read_maps(given.maps)
    program = Program(root, given.package or PACKAGES, (given.config or root / "pyproject.toml").resolve())
    program.analyze()
    renaming = Renaming(program, maps)
    renaming.run()
    for title, lines in (
        ("Uses", [f"{count:5} {entry}" for entry, count in renaming.uses.items()]),
        ("Assumed, for no other class has that attribute", renaming.assumed),
        ("Warnings", sorted(set(renaming.warnings))),
        (
            "Unresolved candidates",
            [f"{p}:{n}: {text}" for (p, n), text in sorted(renaming.candidates.items())],
        ),
        ("Conflicts", sorted(set(renaming.conflicts))),
    ):
        if lines:
            print(f"{title} ({len(lines)}):", *lines, sep="\n  ")
    if not renaming.conflicts and not given.check:
        renaming.write()
    return bool(renaming.conflicts)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # freeing mypy's graph takes longer than the analysis
