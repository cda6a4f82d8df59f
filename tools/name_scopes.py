"""Python's scopes: which module, class, function or comprehension binds each name of a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Symbol(NamedTuple):
    """A name and the scope that binds it. Attributes are bound by the scope of their class."""

    scope: str
    name: str


class Span(NamedTuple):
    """Where an expression is: lines from 1, columns in bytes from 0."""

    line: int
    column: int
    end_line: int
    end_column: int


def span(node: Any) -> Span:
    """The place of a node of `ast`."""
    return Span(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)


@dataclass(eq=False)
class Scope:
    """A module, class, function, lambda or comprehension, and the names that it binds."""

    id: str
    name: str
    kind: str
    node: ast.AST
    module: Module
    parent: Scope | None
    names: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Name -> module and name in it (None: the module itself)."""
    aliased: set[str] = field(default_factory=set)
    elsewhere: dict[str, str] = field(default_factory=dict)
    children: list[Scope] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Dotted names from the module's scope on."""
        outer = self.parent.path if self.parent else ""
        return f"{outer}.{self.name}".strip(".") if self.parent else ""

    def binder(self, name: str) -> Scope | None:
        """The scope that binds `name` for code in this one, or None for builtins."""
        scope: Scope | None = self
        if self.elsewhere.get(name) == "global":
            return self.module.scope
        while scope:
            skipped = scope is not self and scope.kind == "class"
            if name in scope.names and not skipped and name not in scope.elsewhere:
                return scope
            scope = scope.parent
        return None

    def enclosing(self, kind: str) -> Scope | None:
        """The nearest scope of this kind, this one included."""
        scope: Scope | None = self
        while scope and scope.kind != kind:
            scope = scope.parent
        return scope

    def within(self) -> Iterator[Scope]:
        """All scopes from here on inwards."""
        yield self
        for child in self.children:
            yield from child.within()


class Use(NamedTuple):
    """An identifier that a scope resolves, in bytes from the start of the file."""

    offset: int
    name: str
    scope: Scope


class Module:
    """A parsed file: its scopes and everything in it that may name something."""

    def __init__(self, name: str, path: Path, source: bytes) -> None:
        self.name, self.path, self.source = name, path, source
        self.package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.tree = ast.parse(source)
        self.scope = Scope(name, name, "module", self.tree, self, None)
        self.uses: list[Use] = []
        self.imported: list[tuple[int, str, str, Scope]] = []  # offset, name, module
        self.attributes: list[tuple[ast.Attribute, Scope]] = []
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.tuples: list[tuple[ast.Tuple, Scope]] = []
        self.patterns: list[tuple[ast.MatchClass, Scope]] = []
        self.strings: list[tuple[ast.Constant, Scope]] = []
        _Scoping(self).run()

    def offset(self, line: int, column: int) -> int:
        """Bytes before a place in the file."""
        return self.starts[line - 1] + column

    def line(self, offset: int) -> int:
        """The line of a place in the file."""
        return self.source.count(b"\n", 0, offset) + 1

    def find(self, name: str, start: int, end: int | None = None) -> int:
        """Where the identifier `name` is first, from `start` on."""
        found = re.compile(rb"(?<!\w)%s(?!\w)" % name.encode()).search(
            self.source, start, end or len(self.source)
        )
        if found is None:
            raise LookupError(f"{self.path}: no {name} after line {self.line(start)}")
        return found.start()


class _Scoping(ast.NodeVisitor):
    """Fills a module's scopes and lists."""

    def __init__(self, module: Module, tree: ast.AST | None = None) -> None:
        self.module, self.tree = module, tree or module.tree
        self.scope = module.scope
        self.shift = 0  # of a quoted annotation

    def run(self) -> None:
        for statement in self.tree.body:  # type: ignore[attr-defined]
            self.visit(statement)

    def bind(self, name: str, offset: int, scope: Scope | None = None) -> None:
        scope = scope or self.scope
        scope.names.add(name)
        self.module.uses.append(Use(offset, name, scope))

    def at(self, node: Any) -> int:
        return self.module.offset(node.lineno, node.col_offset)

    def open(self, node: Any, name: str, kind: str) -> Scope:
        scope = Scope(f"{self.module.name}:{node.lineno}", name, kind, node, self.module, self.scope)
        if kind != "class":
            scope.id += f":{node.col_offset}:{type(node).__name__}"
        self.scope.children.append(scope)
        return scope

    def inside(self, scope: Scope, parts: Iterable[ast.AST]) -> None:
        outer, self.scope = self.scope, scope
        for part in parts:
            self.visit(part)
        self.scope = outer

    def visit_Name(self, node: ast.Name) -> None:
        scope = self.scope
        if not isinstance(node.ctx, ast.Load):
            scope.names.add(node.id)
        self.module.uses.append(Use(self.at(node), node.id, scope))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        scope: Scope = self.scope
        while scope.kind == "comprehension" and scope.parent:
            scope = scope.parent
        self.bind(node.target.id, self.at(node.target), scope)
        self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.module.attributes.append((node, self.scope))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.module.calls.append((node, self.scope))
        if isinstance(node.func, ast.Name) and node.func.id in {"cast", "TypeVar", "ParamSpec"}:
            bounds = [each.value for each in node.keywords if each.arg == "bound"]
            for part in node.args[:1] if node.func.id == "cast" else bounds:
                self.quoted(part)
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self.module.tuples.append((node, self.scope))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.module.strings.append((node, self.scope))

    def quoted(self, annotation: ast.AST | None) -> None:
        """Visit the annotations in quotes that are in this one."""
        if annotation is None or (
            isinstance(annotation, ast.Subscript) and "Literal" in ast.dump(annotation.value)
        ):
            return
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            text, start = annotation.value, self.at(annotation) + 1
            if self.module.source[start : start + len(text)] == text.encode():
                try:
                    tree = ast.parse(text, mode="eval").body
                except SyntaxError:
                    return
                for part in ast.walk(tree):
                    if hasattr(part, "lineno"):
                        ast.increment_lineno(part, 0)
                        part.col_offset += annotation.col_offset + 1  # type: ignore[attr-defined]
                        part.end_col_offset += annotation.col_offset + 1  # type: ignore[attr-defined]
                        part.lineno = part.end_lineno = annotation.lineno  # type: ignore[attr-defined]
                self.visit(tree)
            return
        for part in ast.iter_child_nodes(annotation):
            self.quoted(part)

    def annotation(self, node: ast.AST | None) -> None:
        if node is not None:
            self.visit(node)
            self.quoted(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.annotation(node.annotation)
        self.visit(node.target)
        if node.value:
            self.visit(node.value)

    def arguments(self, node: ast.arguments) -> list[ast.arg]:
        for default in [*node.defaults, *(one for one in node.kw_defaults if one)]:
            self.visit(default)
        every = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        every += [one for one in (node.vararg, node.kwarg) if one]
        for one in every:
            self.annotation(one.annotation)
        return every

    def parameters(self, scope: Scope, every: list[ast.arg]) -> None:
        for one in every:
            self.bind(one.arg, self.at(one), scope)
            scope.parameters.add(one.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        every = self.arguments(node.args)
        self.annotation(node.returns)
        self.bind(node.name, self.module.find(node.name, self.module.find("def", self.at(node)) + 3))
        scope = self.open(node, node.name, "function")
        self.parameters(scope, every)
        self.inside(scope, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        every = self.arguments(node.args)
        scope = self.open(node, "<lambda>", "lambda")
        self.parameters(scope, every)
        self.inside(scope, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(part)
        self.bind(node.name, self.module.find(node.name, self.module.find("class", self.at(node)) + 5))
        self.inside(self.open(node, node.name, "class"), node.body)

    def comprehension(self, node: Any) -> None:
        self.visit(node.generators[0].iter)
        scope = self.open(node, "<comprehension>", "comprehension")
        for number, generator in enumerate(node.generators):
            first = [] if number == 0 else [generator.iter]
            self.inside(scope, [generator.target, *first, *generator.ifs])
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self.inside(scope, parts)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            start = self.at(alias) + (len(alias.name.encode()) if alias.asname else 0)
            self.bind(name, self.module.find(name, start))
            self.scope.imports[name] = (alias.name if alias.asname else name, None)
            self.scope.aliased.add(name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = node.module or ""
        if node.level:
            base = self.module.package.split(".")
            source = ".".join([*base[: len(base) - node.level + 1], *filter(None, [source])])
        for alias in node.names:
            name = alias.asname or alias.name
            self.scope.imports[name] = (source, alias.name)
            if alias.asname:
                self.scope.aliased.add(name)
                self.module.imported.append((self.at(alias), alias.name, source, self.scope))
                self.bind(name, self.module.find(name, self.at(alias) + len(alias.name.encode())))
            else:
                self.bind(name, self.at(alias))

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        start = self.at(node)
        for name in node.names:
            self.scope.elsewhere[name] = type(node).__name__.lower()
            start = self.module.find(name, start + 1)
            self.module.uses.append(Use(start, name, self.scope))

    visit_Nonlocal = visit_Global

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type:
            self.visit(node.type)
        if node.name:
            after = self.module.offset(node.type.end_lineno, node.type.end_col_offset)  # type: ignore[union-attr,arg-type]
            self.bind(node.name, self.module.find(node.name, self.module.find("as", after) + 2))
        for part in node.body:
            self.visit(part)

    def pattern(self, node: Any) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        inner = getattr(node, "pattern", None)
        self.generic_visit(node)
        if name:
            start = self.at(node)
            if inner is not None:
                start = self.module.offset(inner.end_lineno, inner.end_col_offset)
            elif isinstance(node, ast.MatchMapping):
                end = self.module.offset(node.end_lineno, node.end_col_offset)
                start = self.module.source.rfind(b"**", start, end)
            self.bind(name, self.module.find(name, start))

    visit_MatchAs = visit_MatchStar = visit_MatchMapping = pattern

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.module.patterns.append((node, self.scope))
        self.generic_visit(node)
