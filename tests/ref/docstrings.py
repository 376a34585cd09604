"""What the docstrings of ref owe their readers, found in the text alone; test_documentation.py asks for it.

Of each public function:
- every parameter that is an array has its shape: "name: [shape]", "name [shape]", or "as in FUNCTION" where that one
  has it;
- what is returned has a shape and a dtype, in words or in the annotation;
- every exception that its own body raises, or that of a function of ref which it calls, is named under Raises;
- the formula has a source: "Source: …", or "Composed of: …" functions that the body really calls; the file's own
  docstring may say it for all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REF = Path(__file__).parents[2] / "ref"

SHAPE = re.compile(r"\[[^\]\[]*\]|\bshapes?\b|\bbroadcast")
DTYPE = re.compile(r"\bdtypes?\b|\b(?:b?float|u?int)(?:8|16|32|64)\b|\bfloating\b|\bbool\b")
SPECIFIC = re.compile(r"np\.(?:u?int|float|bool)\w*")
ENTRY = re.compile(r"^(\s*)([\w, ]+): +(\S.*)$")
UNIVERSAL = {"round_to"}  # its ValueError, of a storage type that is not known, stands in its own docstring for all
SECTIONS = ("Args", "Returns", "Raises", "Source", "Numerics", "Edge cases", "Composed of")


@dataclass(frozen=True)
class Function:
    """A function of ref and the file it stands in."""

    file: str  # below ref, such as quant/int8.py
    node: ast.FunctionDef
    module: ast.Module

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def is_public(self) -> bool:
        return not self.name.startswith("_")


@cache
def files() -> dict[str, ast.Module]:
    """Every file of ref by its path below it."""
    found = {}
    for path in sorted(REF.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            found[path.relative_to(REF).as_posix()] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def functions_of(file: str, module: ast.Module) -> list[Function]:
    return [Function(file, node, module) for node in module.body if isinstance(node, ast.FunctionDef)]


@cache
def functions() -> dict[tuple[str, str], Function]:
    """All top-level functions, by file and name."""
    return {(f.file, f.name): f for file, module in files().items() for f in functions_of(file, module)}


def named(name: str) -> list[Function]:
    """The functions of this name, in whatever file."""
    return [function for (_, own), function in functions().items() if own == name]


@cache
def array_aliases(module: ast.Module) -> dict[str, str]:
    """Names of a module that stand for arrays, with what they mean."""
    aliases = {"NDArray": "", "ArrayLike": ""}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = ast.unparse(node.value)
            if re.search(rf"\b({'|'.join(aliases)})\b", text) and "Callable" not in text and "{" not in text:
                aliases[node.targets[0].id] = text
    for node in module.body:  # such as Codes of ref.quant.fp8
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ref."):
            source = (node.module or "").removeprefix("ref.").replace(".", "/") + ".py"
            theirs = array_aliases(files()[source]) if source in files() else {}
            aliases |= {alias.name: theirs[alias.name] for alias in node.names if alias.name in theirs}
    return aliases


def is_array(annotation: ast.expr | None, module: ast.Module) -> bool:
    """Arrays and sequences of arrays; tables of tensors by name have the shapes that their file's docstring says."""
    text = ast.unparse(annotation) if annotation else ""
    words = re.findall(r"\w+", text)
    return bool(set(words) & array_aliases(module).keys()) and not re.match(r"(Mapping|dict|Callable)\b", text)


def array_parameters(function: Function) -> list[str]:
    arguments = function.node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in every if is_array(argument.annotation, function.module)]


def entries(doc: str) -> dict[str, str]:
    """Parameter → what stands behind its colon, lines that are indented further included."""
    found: dict[str, str] = {}
    names: list[str] = []
    indent = 0
    for line in doc.splitlines():
        match = ENTRY.match(line)
        if match and match[2].strip() not in SECTIONS and re.fullmatch(r"\w+(, \w+)*|the others", match[2].strip()):
            names, indent = match[2].strip().split(", "), len(match[1])
            found |= dict.fromkeys(names, match[3])
        elif names and line.strip() and len(line) - len(line.lstrip()) > indent:
            for name in names:
                found[name] += " " + line.strip()
        else:
            names = []
    return found


def whole_reference(function: Function) -> str:
    """ "as in FUNCTION" of a docstring that leaves all arguments, dtype and errors to another function's."""
    match = re.search(r"arguments, dtype, errors (as in [\w.]*\w)", function.doc)
    return match[1] if match else ""


def has_shape(function: Function, parameter: str, asked: frozenset[str] = frozenset()) -> bool:
    """Whether the docstring says the shape of a parameter, itself or by naming a function that does."""
    said = entries(function.doc)
    text = said.get(parameter, said.get("the others", whole_reference(function)))
    if SHAPE.search(text):
        return True
    for name in re.findall(r"[\w.]*\w", text.partition("as ")[2]):  # as in rope_kv_write; as for ref.mla.mla_dense
        for other in named(name.rpartition(".")[2]):
            if other.name not in asked and has_shape(other, parameter, asked | {function.name}):
                return True
    inline = (  # logits, weights [vocab]; shape and dtype as x; a scale of a shape that …; all arrays of any shape
        rf"\b{parameter}\b(?:(?:,| and) \w+)*,? \[",
        rf"\bshapes? (?:and dtypes? )?(?:as|of) {parameter}\b",
        rf"\b{parameter}\b[^.;:\[]*\bof (?:a|any|one) shape\b",
        r"\b(?:both|two arrays|seed, \w+ and \w+)\b[^.;:]* of (?:any|one) shape\b",
        rf"\b{parameter}\b are one \[",
    )
    if any(re.search(form, function.doc) for form in inline):
        return True
    arrow = re.search(r"\[[^→]*→", function.doc)  # [num_tokens, n], [n] → [num_tokens]: in the order of parameters
    return arrow is not None and len(array_parameters(function)) == arrow[0].count("[")


def return_problems(function: Function) -> Iterator[str]:
    returns = function.node.returns
    if not is_array(returns, function.module):
        return
    doc = function.doc
    after = doc.split("Returns:")[1] if "Returns:" in doc else doc
    if not SHAPE.search(after):
        yield "returns: no shape"
    text = ast.unparse(returns) if returns else ""
    for alias, meaning in array_aliases(function.module).items():
        text = re.sub(rf"\b{alias}\b", f"{alias} {meaning}", text)
    if whole_reference(function):
        return
    if not DTYPE.search(after) and not (SPECIFIC.search(text) and "Any" not in text.replace("np.integer[Any]", "")):
        yield "returns: no dtype"


def raised(node: ast.AST) -> set[str]:
    """Names of the exceptions that a piece of code raises by itself."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            call = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            found.add(ast.unparse(call))
    return found


@cache
def called(function: Function) -> list[Function]:
    """The functions of ref that the body calls: of its own file, or imported by name."""
    sources = {own.name: own for own in functions_of(function.file, function.module)}
    for node in function.module.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ref."):
            file = (node.module or "").removeprefix("ref.").replace(".", "/") + ".py"
            for alias in node.names:
                if (file, alias.name) in functions():
                    sources[alias.name] = functions()[file, alias.name]
    names = {n.id for n in ast.walk(function.node) if isinstance(n, ast.Name)} - {function.name, *UNIVERSAL}
    return [sources[name] for name in sorted(names & sources.keys())]


def raise_problems(function: Function) -> Iterator[str]:
    origin = {error: other.name for other in called(function) for error in raised(other.node)}
    origin |= dict.fromkeys(raised(function.node), "itself")
    section = re.search(
        r"Raises:?(.*?)(?=\n\s*\n|\n(?:Args|Returns|Source|Numerics|Edge cases):|\Z)", function.doc, re.S
    )
    said = (section[1] if section else "") + whole_reference(function)
    for name in re.findall(r"\b(?:see|as in|as|and) ([\w.]*\w)\b", said):
        said += "".join(other.doc for other in named(name.rpartition(".")[2]))
    for error, name in sorted(origin.items()):
        if not re.search(rf"\b{error}\b", said):
            yield f"raises: {error} of {name} is not named"


def source_problems(function: Function) -> Iterator[str]:
    composed = re.search(r"Composed of: (.+?)(?:\n\s*\n|\n\w[\w ]*:|\Z)", function.doc, re.S)
    if composed:
        names = {other.name for other in called(function)}
        claimed = re.findall(r"\b[a-z]\w*\b", re.sub(r"\([^)]*\)", "", composed[1]))
        yield from (f"composed of {name}, which it does not call" for name in claimed if name not in names)
    elif "Source:" not in function.doc + (ast.get_docstring(function.module) or ""):
        yield "no source"


def problems(function: Function) -> list[str]:
    """What a public function's docstring lacks."""
    if not function.doc:
        return ["no docstring"]
    shapes = [f"{name}: no shape" for name in array_parameters(function) if not has_shape(function, name)]
    return [*shapes, *return_problems(function), *raise_problems(function), *source_problems(function)]
