"""Kernels from source to machine code, and the private cache that spares the next start from compiling.

A kernel is plain control flow in Python over 64-bit integers, lowered by Numba, that calls *routines*: vector code
emitted through llvmlite for one SIMD level (kernels/cpu/simd.py). Both become one LLVM module, optimised together, and
one object file. Object files are kept in the user's cache folder under a key of everything they depend on, and load
without Numba being imported. This is the only file that touches Numba's internals.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import llvmlite.ir as ir

from edgeinfer.kernels.cache import cache_root, private_folder
from edgeinfer.kernels.cpu.simd import I64, Simd
from edgeinfer.kernels.levels import Level, host_features

Routine = Any  # Callable[[Simd, *values], value | None]; called from control code without its first argument


def routine(function: Callable[..., Any]) -> Routine:
    """Mark an emitter that control code may call. (It says so to readers, and to type checkers.)"""
    return function


@dataclass(frozen=True)
class Kernel:
    """`control` is what Numba lowers; it may call the `routines`, which are emitted anew for each level.

    Every argument and result is a 64-bit integer. Control code calls a routine by the name it is bound to, as a global or
    as a variable of the function around it.
    """

    name: str
    control: Callable[..., Any]
    routines: Sequence[Routine]

    @property
    def symbol(self) -> str:
        """Its entry point's name. Prefixed: a bare `norm` would be found in the process before it is found in the object."""
        return f"edgeinfer_{self.name}"

    @property
    def arguments(self) -> int:
        return len(inspect.signature(self.control).parameters)


class CompileError(RuntimeError):
    """A kernel did not compile, or needs a symbol that the process does not have: a fault in this package."""


# --- source -> object code -------------------------------------------------------------------------------------------

_lock = threading.RLock()


def _lower(kernel: Kernel) -> str:
    """The control function as LLVM IR, optimised by itself; its routines are undefined symbols."""
    from numba.core import compiler, types, typing
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    word = types.int64
    externals = {
        id(routine): types.ExternalFunction(_symbol(kernel, routine), typing.signature(word, *[word] * _arity(routine)))
        for routine in kernel.routines
    }

    def bound(value: Any) -> Any:  # a routine as Numba sees it: an external function
        return externals.get(id(value), value)

    source = kernel.control
    cells = tuple(CellType(bound(cell.cell_contents)) for cell in source.__closure__ or ())
    names = {name: bound(value) for name, value in source.__globals__.items()}
    control = FunctionType(source.__code__, names, source.__name__, source.__defaults__, cells)
    flags = compiler.Flags()
    flags.no_compile = True  # lowering only: nothing is finalised or run, so a foreign level's code can be made
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    flags.nrt = False
    with global_compiler_lock:
        typing_context, target_context = cpu_target.typing_context, cpu_target.target_context
        typing_context.refresh()
        target_context.refresh()
        result = compiler.compile_extra(
            typing_context, target_context, control, (word,) * kernel.arguments, word, flags, {}
        )
        module = str(result.library._final_module)
    return module.replace(result.fndesc.llvm_func_name, "control")


def _symbol(kernel: Kernel, routine: Routine) -> str:
    return f"routine_{kernel.routines.index(routine)}"


def _arity(routine: Routine) -> int:
    return len(inspect.signature(routine).parameters) - 1  # the first is the Simd


def _emit_routines(kernel: Kernel, level: Level, triple: str) -> str:
    """The routines for one level, and the entry point that calls `control`."""
    module = ir.Module(kernel.name)
    module.triple = triple
    for routine in kernel.routines:
        fn = ir.Function(module, ir.FunctionType(I64, [I64] * _arity(routine)), _symbol(kernel, routine))
        fn.attributes.add("alwaysinline")
        builder = ir.IRBuilder(fn.append_basic_block("entry"))
        body = fn.append_basic_block("body")  # the entry block keeps stack slots only
        builder.position_at_end(body)
        result = routine(Simd(level, builder), *fn.args)
        builder.ret(ir.Constant(I64, 0) if result is None else result)
        ir.IRBuilder(fn.entry_basic_block).branch(body)
    # Numba's own convention: control(result*, exception**, arguments...) -> status
    word = I64.as_pointer()
    control = ir.Function(module, ir.FunctionType(ir.IntType(32), [word, word, *[I64] * kernel.arguments]), "control")
    entry = ir.Function(module, ir.FunctionType(I64, [I64] * kernel.arguments), kernel.symbol)
    builder = ir.IRBuilder(entry.append_basic_block("entry"))
    result, raised = builder.alloca(I64), builder.alloca(I64)
    builder.call(control, [result, raised, *entry.args])
    builder.ret(builder.load(result, typ=I64))
    return str(module)


@lru_cache(maxsize=1)
def _initialise_llvm() -> None:
    # Needed before llvmlite 0.45, deprecated since; targets other than the host's are for tests and prebuilt objects
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def _target_machine(level: Level, triple: str) -> llvm.TargetMachine:
    _initialise_llvm()
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(level.cpu, level.features, opt=3, reloc="pic", codemodel="small", jit=True)


def _optimise(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    """Inline and clean up. Vectors, unrolling and order are written, not hoped for: LLVM's reassociation and loop passes are
    left out, since they regroup a tile's sums by row of activations, and every weight vector then spills.
    """
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_sroa_pass()
    passes.add_new_gvn_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_loop_rotate_pass()
    passes.add_new_gvn_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3)))


def compile_kernel(kernel: Kernel, level: Level, triple: str | None = None, assembly: bool = False) -> Any:
    """Object code (bytes) for the kernel at that level, or its assembly (str). Raises CompileError.

    triple: LLVM's name of the system to compile for, by default this process's.
    """
    triple = triple or llvm.get_process_triple()
    with _lock:
        module = llvm.parse_assembly(_lower(kernel))
        module.link_in(llvm.parse_assembly(_emit_routines(kernel, level, triple)))
        machine = _target_machine(level, triple)
        module.triple = triple
        module.data_layout = str(machine.target_data)
        for function in module.functions:
            if not function.is_declaration and function.name != kernel.symbol:
                function.linkage = "internal"
            if function.name == "control":
                function.add_function_attribute("alwaysinline")
            if not function.is_declaration:
                function.add_function_attribute("nounwind")
        module.verify()
        _optimise(module, machine)
        strays = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
        if strays:
            raise CompileError(f"kernel {kernel.name} at {level.name} needs symbols that need not exist: {', '.join(strays)}")
        return machine.emit_assembly(module) if assembly else machine.emit_object(module)


# --- the cache -------------------------------------------------------------------------------------------------------

_ROOM = Path(__file__).parent


def _source_files() -> list[Path]:
    return sorted(_ROOM.rglob("*.py"))


@lru_cache(maxsize=1)
def _source_hash() -> str:
    """Of every source in this package: a kernel's code may come from any of them (Numba's own key sees one file only)."""
    digest = hashlib.sha256()
    for path in _source_files():
        digest.update(path.relative_to(_ROOM).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _compiler_versions() -> str:
    """A hash of Numba's and llvmlite's version files: found without importing Numba, or the package metadata, which is slow."""
    digest = hashlib.sha256(llvmlite.__version__.encode())
    spec = importlib.util.find_spec("numba")
    if spec and spec.origin:
        version = Path(spec.origin).parent / "_version.py"
        digest.update(version.read_bytes() if version.exists() else spec.origin.encode())
    return digest.hexdigest()


def cache_key(level: Level) -> str:
    """A name for everything that object code depends on: sources, compiler versions, processor, level."""
    what = (_source_hash(), _compiler_versions(), level.name, level.cpu, level.features)
    parts = (*what, sys.platform, llvm.get_process_triple(), *sorted(host_features()))
    return f"{level.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:20]}"


_DIGEST = hashlib.sha256().digest_size


def _seal(path: Path, body: bytes) -> bytes:
    """Digest of the code and of the place it was written for: a file that was moved, renamed or torn is not loaded."""
    return hashlib.sha256(f"{path.parent.name}/{path.name}\0".encode() + body).digest()


def _read_cached(path: Path) -> bytes | None:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a pipe or a device would be read for ever
            return None
        data = path.read_bytes()
    except OSError:
        return None
    body = data[_DIGEST:]
    return body if _seal(path, body) == data[:_DIGEST] else None


def _write_cached(path: Path, body: bytes) -> None:
    """Written whole or not at all; a cache that cannot be written only costs the next start its compile time."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_seal(path, body) + body)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        return


# --- loaded code -----------------------------------------------------------------------------------------------------


_engines: list[Any] = []  # op tables hold bare addresses into them, so they are never freed


class Code:
    """The kernels of one level, loaded into this process on first use. Thread-safe; addresses live as long as the process."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.compiled: list[str] = []  # kernels that were not in the cache
        self.loaded: list[str] = []
        self._addresses: dict[str, int] = {}
        self._engine: Any = None
        self.folder = private_folder(cache_root())
        for part in ("kernels", cache_key(level)):
            self.folder = private_folder(self.folder / part) if self.folder else None

    def is_cached(self, kernel: Kernel) -> bool:
        return kernel.name in self._addresses or (self.folder is not None and (self.folder / kernel.name).exists())

    def address(self, kernel: Kernel) -> int:
        """The kernel's entry point, compiling it if need be."""
        with _lock:
            if kernel.name not in self._addresses:
                path = self.folder / kernel.name if self.folder else None
                body = _read_cached(path) if path else None
                if body is None:
                    body = compile_kernel(kernel, self.level)
                    self.compiled.append(kernel.name)
                    if path:
                        _write_cached(path, body)
                self._addresses[kernel.name] = self._load(kernel.symbol, body)
                self.loaded.append(kernel.name)
            return self._addresses[kernel.name]

    def _load(self, symbol: str, body: bytes) -> int:
        if self._engine is None:
            _initialise_llvm()
            module = llvm.parse_assembly("")
            module.triple = llvm.get_process_triple()
            machine = _target_machine(self.level, module.triple)
            # llvmlite's memory manager keeps an object's code and constants together, as the small code model needs
            self._engine = llvm.create_mcjit_compiler(module, machine, use_lmm=True)
            _engines.append(self._engine)
        self._engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(body))
        self._engine.finalize_object()
        address = int(self._engine.get_function_address(symbol))
        if address == 0:
            raise CompileError(f"the object code has no function {symbol}")
        return address


@cache
def code(level: Level) -> Code:
    """This process's kernels for a level."""
    return Code(level)
