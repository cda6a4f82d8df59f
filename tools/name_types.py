"""What names, attributes and keyword arguments stand for, by mypy's types."""

from __future__ import annotations

import ast
import gc
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mypy import build, nodes, types
from mypy.fscache import FileSystemCache
from mypy.main import process_options
from mypy.subtypes import is_subtype
from mypy.typevars import fill_typevars_with_any
from name_scopes import Module, Scope, Span, Symbol, span


class _Typing:
    """The types of objects, callees and arguments, and the classes, of one file.

    mypy is compiled, and its visitors cannot be subclassed: the attributes of its nodes are walked.
    """

    links = frozenset({"node", "info", "analyzed", "original_def", "definition", "type", "unanalyzed_type"})
    parts: ClassVar[dict[type, tuple[str, ...]]] = {}

    def __init__(self, tree: nodes.MypyFile, known: dict[nodes.Expression, types.Type]) -> None:
        self.known = known
        self.types: dict[Span, types.Type] = {}
        self.classes: dict[int, nodes.TypeInfo] = {}
        waiting: list[Any] = list(tree.defs)
        seen: set[int] = set()
        while waiting:
            node = waiting.pop()
            if isinstance(node, list | tuple):
                waiting += node
                continue
            if not isinstance(node, nodes.Node) or id(node) in seen:
                continue
            if isinstance(node, nodes.TypeInfo | nodes.Var | nodes.MypyFile | nodes.TypeAlias):
                continue
            seen.add(id(node))
            if isinstance(node, nodes.MemberExpr):
                self.keep(node.expr)
            elif isinstance(node, nodes.CallExpr):
                for part in (node.callee, *node.args):
                    self.keep(part)
            elif isinstance(node, nodes.ClassDef):
                self.classes[node.line] = node.info
            waiting += [getattr(node, part, None) for part in self.attributes(type(node))]

    @classmethod
    def attributes(cls, of: type) -> tuple[str, ...]:
        """The attributes of a class of nodes that may hold nodes."""
        if of not in cls.parts:
            every = {each for base in of.__mro__ for each in getattr(base, "__mypyc_attrs__", base.__dict__)}
            plain = {"line", "column", "end_line", "end_column", "name", "fullname", "_fullname", "__dict__"}
            cls.parts[of] = tuple(each for each in every - plain - cls.links if not each.startswith("__"))
        return cls.parts[of]

    def keep(self, node: nodes.Expression) -> None:
        of = self.known.get(node)
        if of is not None and node.end_line is not None and node.end_column is not None:
            self.types[Span(node.line, node.column, node.end_line, node.end_column)] = of


class Owners(NamedTuple):
    """The classes that an attribute may belong to; `unknown` if the object may also be anything."""

    classes: frozenset[nodes.TypeInfo] = frozenset()
    unknown: bool = False


class Program:
    """All modules with their scopes and mypy's types."""

    def __init__(self, root: Path, packages: Iterable[str], config: Path) -> None:
        self.root, self.packages = root, tuple(packages)
        self.modules: dict[str, Module] = {}
        for package in self.packages:
            for path in sorted(root.joinpath(*package.split(".")).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                self.modules[name] = Module(name, path, path.read_bytes())
        self.scopes = {scope.id: scope for module in self.modules.values() for scope in module.scope.within()}
        self.types: dict[str, dict[Span, types.Type]] = {}
        self.classes: dict[str, nodes.TypeInfo] = {}
        self.config = config
        self.loaded: dict[str, nodes.MypyFile] = {}

    def analyze(self) -> None:
        """Have mypy check all modules. Other libraries come from a cache in `build/`."""
        cache = self.root / "build" / "rename_names"
        for package in self.packages:
            for old in cache.glob(f"*/{package.split('.')[0]}*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        command = ["--config-file", str(self.config), "--check-untyped-defs", "--cache-dir", str(cache)]
        files = FileSystemCache()
        os.chdir(self.root)
        sources, options = process_options(
            [*command, *(part for package in self.packages for part in ("-p", package))], fscache=files
        )
        options.export_types = options.preserve_asts = True
        options.native_parser = options.sqlite_cache = False
        gc.disable()
        result = build.build(sources, options, fscache=files)
        self.loaded = result.files
        for name in self.modules:
            typing = _Typing(result.files[name], result.types)
            self.types[name] = typing.types
            for line, info in typing.classes.items():
                self.classes[f"{name}:{line}"] = info
        self.ids = {info: key for key, info in self.classes.items()}

    # What a name, an expression or an attribute stands for.

    def canonical(self, module: str, name: str) -> Symbol | str | None:
        """The definition, or the name of the module, that `name` in `module` is."""
        seen = set()
        while module in self.modules and (module, name) not in seen:
            seen.add((module, name))
            scope = self.modules[module].scope
            if name not in scope.names:
                break
            if name not in scope.imports:
                return Symbol(module, name)
            source, inner = scope.imports[name]
            if inner is None:
                return source
            module, name = source, inner
        full = f"{module}.{name}"
        return full if full in self.modules else None

    def lookup(self, name: str, scope: Scope) -> Symbol | str | None:
        """What `name` is for code in `scope`: a symbol of ours, the name of a module, or None."""
        binder = scope.binder(name)
        if binder is None:
            return None
        if name in binder.imports:
            source, inner = binder.imports[name]
            return source if inner is None else self.canonical(source, inner)
        return Symbol(binder.id, name)

    def value(self, node: ast.AST, scope: Scope) -> Symbol | str | None:
        """What an expression of names and dots is, as far as modules and classes tell."""
        if isinstance(node, ast.Name):
            return self.lookup(node.id, scope)
        if isinstance(node, ast.Attribute):
            whole = self.value(node.value, scope)
            if isinstance(whole, str):
                found = self.canonical(whole, node.attr)
                return found or f"{whole}.{node.attr}"
            inner = whole and self.definition(whole)
            if inner and inner.kind == "class":
                return next((s for s in self.attribute_of(inner, node.attr)), None)
        return None

    def definition(self, symbol: Symbol) -> Scope | None:
        """The scope of the class or function that a symbol is."""
        found = self.definitions(symbol)
        return found[0] if found else None

    def definitions(self, symbol: Symbol) -> list[Scope]:
        """The scopes of all definitions of a class or function: overloads and setters as well."""
        outer = self.scopes[symbol.scope]
        return [child for child in outer.children if child.name == symbol.name]

    def attribute_of(self, scope: Scope, name: str) -> Iterator[Symbol]:
        info = self.classes.get(scope.id)
        for owner in self.owners_in(info, name) if info else ():
            if owner in self.ids:
                yield Symbol(self.ids[owner], name)

    def own(self, info: nodes.TypeInfo, name: str) -> bool:
        """Whether the class itself defines an attribute."""
        scope = self.scopes.get(self.ids.get(info, ""))
        return name in info.names or (scope is not None and name in scope.names)

    def owners_in(self, info: nodes.TypeInfo, name: str) -> list[nodes.TypeInfo]:
        """The classes of an MRO that define an attribute, the nearest first."""
        return [base for base in info.mro if self.own(base, name)]

    def owners(self, of: types.Type | None, name: str) -> Owners:
        """The classes that define `name` for an object of this type."""
        if of is None:
            return Owners(unknown=True)
        proper = types.get_proper_type(of)
        if isinstance(proper, types.UnionType):
            parts = [self.owners(item, name) for item in proper.items]
            known = frozenset[nodes.TypeInfo]().union(*(part.classes for part in parts))
            return Owners(known, any(part.unknown for part in parts))
        if isinstance(proper, types.Instance):
            found = self.owners_in(proper.type, name)
            open_ended = proper.type.fallback_to_any or any(
                "__getattr__" in base.names for base in proper.type.mro
            )
            return Owners(frozenset(found), not found and open_ended)
        if isinstance(proper, types.FunctionLike):
            return (
                self.owners(types.Instance(proper.type_object(), []), name)
                if proper.is_type_obj()
                else Owners()
            )
        if isinstance(proper, types.TypeType):
            return self.owners(proper.item, name)
        if isinstance(proper, types.TypeVarType):
            return self.owners(proper.upper_bound, name)
        if isinstance(proper, types.TupleType):
            return self.owners(proper.partial_fallback, name)
        if isinstance(proper, types.LiteralType | types.TypedDictType):
            return self.owners(proper.fallback, name)
        return Owners(unknown=not isinstance(proper, types.NoneType))

    def owners_of(self, node: ast.expr, scope: Scope, name: str) -> Owners:
        """The classes that define `name` for the object that an expression is."""
        method = scope.enclosing("function")
        while method and method.parent and method.parent.kind == "function":
            method = method.parent
        info = self.classes.get(method.parent.id) if method and method.parent else None
        if (
            info
            and isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "super"
        ):
            return Owners(frozenset(base for base in info.mro[1:] if self.own(base, name)))
        of = self.types[scope.module.name].get(span(node))
        found = self.owners(of, name)
        first = next(iter(method.node.args.args), None) if info and method else None  # type: ignore[attr-defined]
        if found.unknown and info and first and isinstance(node, ast.Name) and node.id == first.arg:
            return Owners(frozenset(self.owners_in(info, name)))  # in code that mypy calls unreachable
        return found

    def constructed(self, info: nodes.TypeInfo, name: str) -> list[Symbol]:
        """What a keyword argument of a class's constructor is: a parameter, or a field."""
        for base in info.mro:
            scope = self.scopes.get(self.ids.get(base, ""))
            if scope is None:
                if "__init__" in base.names and base.fullname != "builtins.object":
                    break
                continue
            made = [child for child in scope.children if child.name in {"__init__", "__new__"}]
            found = [Symbol(child.id, name) for child in made if name in child.parameters]
            if not made and name in scope.names:
                found = [Symbol(scope.id, name)]
            if found or (made and not any(child.node.args.kwarg for child in made)):  # type: ignore[attr-defined]
                return found
        return []

    def parameters(self, symbol: Symbol, name: str) -> list[Symbol] | None:
        """What a keyword argument is for a function or class of ours; None if the symbol is neither."""
        found = self.definitions(symbol)
        if found and found[0].kind == "class":
            info = self.classes.get(found[0].id)
            return self.constructed(info, name) if info else None
        return [Symbol(each.id, name) for each in found if name in each.parameters] if found else None

    def arguments(self, call: ast.Call, scope: Scope, name: str) -> list[Symbol] | None:
        """What the keyword argument `name` of a call is; None if mypy does not know the callee."""
        func = call.func
        whole = self.value(func, scope)
        found = self.parameters(whole, name) if isinstance(whole, Symbol) else None
        unknown = found is None
        if found is None and isinstance(func, ast.Attribute):
            owners = self.owners_of(func.value, scope, func.attr)
            unknown = owners.unknown
            ours = [owner for owner in owners.classes if owner in self.ids]
            if func.attr == "__init__":
                found = [
                    s
                    for owner in self.owners_of(func.value, scope, name).classes | {*ours}
                    for s in self.constructed(owner, name)
                ]
            else:
                each = [self.parameters(Symbol(self.ids[owner], func.attr), name) for owner in ours]
                found = [s for part in each for s in part or ()]
        of = types.get_proper_type(self.types[scope.module.name].get(span(func)))
        if not found:
            item = of.item if isinstance(of, types.TypeType) else of
            if isinstance(item, types.FunctionLike) and item.is_type_obj():
                found, unknown = self.constructed(item.type_object(), name), False
            elif isinstance(of, types.TypeType) and isinstance(item, types.Instance):
                found, unknown = self.constructed(item.type, name), False
            elif isinstance(of, types.Instance):
                each = [
                    self.parameters(Symbol(self.ids[owner], "__call__"), name)
                    for owner in self.owners_in(of.type, "__call__")
                    if owner in self.ids
                ]
                found, unknown = [s for part in each for s in part or ()], False
            elif isinstance(of, types.FunctionLike):
                unknown = False
        called = (
            func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
        )
        if not found and called in {"replace", "_replace", "evolve"}:
            changed = (
                func.value
                if called == "_replace" and isinstance(func, ast.Attribute)
                else [*call.args, func][0]
            )
            owners = self.owners_of(changed, scope, name)
            found = [Symbol(self.ids[owner], name) for owner in owners.classes if owner in self.ids]
            unknown = owners.unknown
        for passed in call.args if not found else ():  # functools.partial, Executor.submit, …
            symbol = self.value(passed, scope)
            symbols = [symbol] if isinstance(symbol, Symbol) else []
            if isinstance(passed, ast.Attribute) and not symbols:
                owners = self.owners_of(passed.value, scope, passed.attr)
                symbols = [
                    Symbol(self.ids[owner], passed.attr) for owner in owners.classes if owner in self.ids
                ]
            found = [s for symbol in symbols for s in self.parameters(symbol, name) or ()]
            if found:
                break
        return None if unknown and not found else found or []

    def group(self, symbol: Symbol, notes: list[str]) -> set[nodes.TypeInfo]:
        """The classes that share an attribute with a class: by inheritance, and by protocols."""
        name, start = symbol.name, self.classes[symbol.scope]
        protocols = [info for info in self.ids if info.is_protocol and self.own(info, name)]
        sets = [set(self.owners_in(info, name)) for info in self.ids]
        for protocol in protocols:
            wanted = types.Instance(
                protocol, [types.AnyType(types.TypeOfAny.special_form)] * len(protocol.type_vars)
            )
            for info in self.ids:
                if protocol in info.mro or any(
                    not self.owners_in(info, each) for each in protocol.protocol_members
                ):
                    continue
                if is_subtype(fill_typevars_with_any(info), wanted):
                    sets.append({protocol, *self.owners_in(info, name)})
                    notes.append(f"{info.fullname}.{name} implements protocol {protocol.fullname}")
        grown = {start}
        while more := {info for each in sets if each & grown for info in each} - grown:
            grown |= more
        return grown
