"""Splits a state into a container, which is a table of tensors and the small rest of the state. Its bytes are one
safetensors file.

``split`` names every tensor and array by its path in the state and pickles the rest with persistent ids in their place.
``join`` rebuilds the state. Tensors that safetensors cannot represent (sparse and quantized tensors, other element
types, subclasses) are pickled. Tensors with different views of one storage are stored as that storage, so that they
share it again.
"""

from __future__ import annotations

import bisect
import io
import math
import pickle
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from . import _native

STATE = "__mainstay_state__"

#: Element types: the name in torch and that in safetensors.
_TORCH = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_NUMPY = {**_TORCH}
_ITEM = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4,
    "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


class Part(NamedTuple):
    """One tensor of the table, and the current location of its bytes."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    bytes: int
    #: The address of the bytes in this process's memory; None if they are on a device.
    address: Optional[int]
    #: The tensor or array that owns the bytes.
    owner: Any


class Split(NamedTuple):
    header: bytes
    parts: List[Tuple[int, Part]]
    rest_at: int
    rest: bytes
    total: int


def split(state: Any, metadata: Dict[str, str]) -> Split:
    """The parts of a state, each with its offset in the file. Raises what pickling raises."""
    found = _Found()
    buffer = io.BytesIO()
    _Pickler(buffer, found).dump(state)
    parts, table = found.parts(_paths(state))
    rest = pickle.dumps({"table": table, "state": buffer.getvalue()}, protocol=5)
    # Widest elements first, so that each tensor is aligned. Raw storages follow, and the rest of the state is last.
    parts.sort(key=lambda part: -_ITEM[part.dtype])
    tensors = [(part.name, part.dtype, list(part.shape)) for part in parts] + [(STATE, "U8", [len(rest)])]
    header, offsets, total = _native.container_header(sorted(metadata.items()), tensors)
    return Split(bytes(header), list(zip(offsets, parts)), offsets[-1], rest, total)


def join(rest: bytes, tensor: Callable) -> Any:
    """Rebuilds the state. ``tensor(name)`` returns a tensor of the table as a new, writable torch tensor or NumPy
    array."""
    table = pickle.loads(rest)
    return of_the_program(_Unpickler(io.BytesIO(table["state"]), table["table"], tensor).load)


def of_the_program(load: Callable) -> Any:
    """Runs ``load``, which unpickles objects of the program. If native code finds that they no longer fit the program,
    this is the innermost frame of the exception. The launcher knows it by its name, so that the exception does not
    count as a failure of Mainstay."""
    return load()


class _Found:
    """The tensors and arrays that pickling found."""

    def __init__(self):
        self.objects: list = []
        self._places: Dict[int, int] = {}
        self._torch = sys.modules.get("torch")
        self._numpy = sys.modules.get("numpy")
        self._jax = sys.modules.get("jax")

    def place(self, obj) -> Optional[int]:
        """The number of an object that goes into the table; None for all others."""
        place = self._places.get(id(obj))
        if place is None and self._is_taken(obj):
            place = self._places[id(obj)] = len(self.objects)
            self.objects.append(obj)
        return place

    def _is_taken(self, obj) -> bool:
        kind = type(obj)
        if self._torch is not None and kind in (self._torch.Tensor, self._torch.nn.Parameter):
            return (
                obj.layout is self._torch.strided
                and obj.device.type in ("cpu", "cuda")
                and not obj.is_quantized
                and not obj.is_conj()
                and not obj.is_neg()
                and not obj.__dict__
                and _element(obj.dtype) is not None
            )
        if self._numpy is not None and kind is self._numpy.ndarray:
            return obj.dtype.name in _NUMPY and obj.dtype.isnative and obj.flags.c_contiguous
        jax = self._jax
        if jax is not None and isinstance(obj, getattr(jax, "Array", ())) and not isinstance(obj, jax.core.Tracer):
            whole = obj.is_fully_addressable and len(obj.devices()) == 1
            return whole and obj.dtype.name in _NUMPY
        return False

    def parts(self, paths: Dict[int, str]) -> Tuple[List[Part], list]:
        """The named tensors of the table, and for each number how to create the object from them."""
        names = _Names(paths)
        parts: List[Part] = []
        shared = self._shared_storages()
        storages: Dict[tuple, str] = {}
        same: Dict[tuple, str] = {}
        table = []
        for number, obj in enumerate(self.objects):
            if self._torch is not None and isinstance(obj, self._torch.Tensor):
                table.append(self._tensor(obj, number, names, parts, shared, storages, same))
                continue
            kind, array = ("array", obj) if type(obj) is getattr(self._numpy, "ndarray", None) else ("jax", None)
            if kind == "jax":
                import numpy

                array = numpy.ascontiguousarray(numpy.asarray(obj))
            name = names.unique(obj, number)
            address = array.__array_interface__["data"][0]
            parts.append(Part(name, _NUMPY[array.dtype.name], array.shape, array.nbytes, address, array))
            table.append((kind, name, array.dtype.name))
        return parts, table

    def _shared_storages(self) -> set:
        """The storages of which there are different or non-contiguous views."""
        seen: Dict[tuple, tuple] = {}
        shared = set()
        for obj in self.objects:
            if self._torch is not None and isinstance(obj, self._torch.Tensor) and obj.numel():
                storage, view = _storage(obj), _view(obj)
                if seen.setdefault(storage, view) != view or not obj.is_contiguous():
                    shared.add(storage)
        return shared

    def _tensor(self, obj, number, names, parts, shared, storages, same) -> tuple:
        is_parameter = type(obj) is self._torch.nn.Parameter
        how = (obj.requires_grad, is_parameter, str(obj.device) if obj.device.type != "cpu" else None)
        plain = obj.detach()
        dtype = _element(obj.dtype)
        storage = _storage(obj)
        if obj.numel() and storage in shared:
            name = storages.get(storage)
            if name is None:
                name = storages[storage] = f"__storage__.{len(storages)}"
                raw = plain.untyped_storage()
                on_host = obj.device.type == "cpu"
                address = raw.data_ptr() if on_host else None
                owner = self._torch.empty(0, dtype=self._torch.uint8, device=obj.device).set_(raw)
                parts.append(Part(name, "U8", (raw.nbytes(),), raw.nbytes(), address, owner))
            view = (str(obj.dtype)[len("torch.") :], tuple(obj.shape), obj.stride(), obj.storage_offset())
            return ("view", name, view, *how)
        # Tied weights are different objects with the same bytes. They become one tensor of the table, and share a
        # storage again after loading.
        key = (storage, _view(obj)) if obj.numel() else (number,)
        name = same.get(key)
        if name is None:
            name = same[key] = names.unique(obj, number)
            length = plain.numel() * plain.element_size()
            address = plain.data_ptr() if obj.device.type == "cpu" else None
            parts.append(Part(name, dtype, tuple(obj.shape), length, address, plain))
        return ("tensor", name, *how)


def _element(dtype) -> Optional[str]:
    return _TORCH.get(str(dtype)[len("torch.") :])


def _storage(tensor) -> tuple:
    return (str(tensor.device), tensor.untyped_storage().data_ptr())


def _view(tensor) -> tuple:
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


class _Names:
    """Names objects by their path. Each name is used once."""

    def __init__(self, paths: Dict[int, str]):
        self._paths = paths
        self._taken = {"__metadata__", STATE}

    def unique(self, obj, number: int) -> str:
        wanted = self._paths.get(id(obj)) or f"object.{number}"
        name, turn = wanted, 1
        while name in self._taken or name.startswith("__storage__."):
            turn += 1
            name = f"{'object.' if name.startswith('__storage__.') else ''}{wanted}#{turn}"
        self._taken.add(name)
        return name


_DEEPEST = 64


def _paths(state: Any) -> Dict[int, str]:
    """The path of each object in nested dicts, lists and tuples, by id. The state keeps the objects alive."""
    paths: Dict[int, str] = {}
    for path, here in _walk(state):
        paths.setdefault(id(here), path or "state")
    return paths


def _walk(state: Any):
    """The leaves of nested dicts, lists and tuples, with their paths."""
    seen = set()
    open_ends = [("", state, 0)]
    while open_ends:
        path, here, depth = open_ends.pop()
        if isinstance(here, dict):
            items = list(here.items())
        elif isinstance(here, (list, tuple)):
            items = list(enumerate(here))
        else:
            yield path, here
            continue
        if id(here) in seen or depth > _DEEPEST:
            continue
        seen.add(id(here))
        for key, value in reversed(items):
            if hasattr(value, "shape") or isinstance(value, (dict, list, tuple)):
                name = str(key).encode("utf-8", "replace").decode()[:512]
                open_ends.append((f"{path}.{name}" if path else name, value, depth + 1))


class _Pickler(pickle.Pickler):
    def __init__(self, file, found: _Found):
        super().__init__(file, protocol=5)
        self._found = found

    def persistent_id(self, obj):
        return self._found.place(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, table: list, tensor: Callable):
        super().__init__(file)
        self._table = table
        self._tensor = tensor
        self._made: Dict[int, Any] = {}

    def persistent_load(self, number):
        if number not in self._made:
            self._made[number] = self._make(*self._table[number])
        return self._made[number]

    def _make(self, kind, name, *how):
        host = self._tensor(name)
        if kind == "array":
            return host
        if kind == "jax":
            import jax.numpy

            return jax.numpy.asarray(host)
        import torch

        if kind == "view":
            (element, shape, stride, offset), *how = how
            dtype = getattr(torch, element)
            host = torch.empty(0, dtype=dtype, device=host.device).set_(host.untyped_storage(), offset, shape, stride)
        needs_grad, is_parameter, device = how
        # A tensor that is already on a device was passed in or created there.
        made = host if device is None or host.device.type != "cpu" else host.to(device)
        if is_parameter:
            return torch.nn.Parameter(made, requires_grad=needs_grad)
        if needs_grad:
            made = made.detach().requires_grad_(True)
        return made


def layout(header: bytes, total: int) -> Dict[str, tuple]:
    """The tensors in a header: ``{name: (dtype, shape, offset, bytes)}``. Raises ValueError if it is invalid."""
    return {name: (dtype, shape, at, length) for name, dtype, shape, at, length in _native.container_tensors(header, total)}


def table_of(rest: bytes) -> list:
    """For each number, how to create the object from tensors."""
    return pickle.loads(rest)["table"]


def room(kind: str, dtype: str, shape, element: Optional[str]):
    """New memory for a tensor of the table: (its owner, its address)."""
    if kind in ("array", "jax"):
        import numpy

        if element in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            import ml_dtypes

            array = numpy.empty(shape, getattr(ml_dtypes, element))
        else:
            array = numpy.empty(shape, element)
        return array, array.__array_interface__["data"][0]
    import torch

    tensor = torch.empty(tuple(shape), dtype=_torch_type(dtype))
    return tensor, tensor.data_ptr()


def device_of(kind: str, more) -> Optional[str]:
    """The device that a tensor of the table was on; None for host memory."""
    return more[-1] if kind in ("tensor", "view") and more else None


def as_bytes(tensor):
    """The bytes of a contiguous tensor, as a tensor."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


def on_device(into: Optional["Targets"], name: str, kind: str, dtype: str, shape, device: str):
    """Memory on a device for a tensor of the table: that of ``into``, or new memory."""
    given = into.room_on_device(name, kind, dtype, shape) if into is not None else None
    if given is not None:
        return given
    import torch

    return torch.empty(tuple(shape), dtype=_torch_type(dtype), device=device)


def _torch_type(dtype: str):
    import torch

    return getattr(torch, next(name for name, safe in _TORCH.items() if safe == dtype))


class Targets:
    """Tensors and arrays of an existing state. Loaded tensors with the same path go into their memory."""

    def __init__(self, state: Any):
        self._by_path: Dict[str, Any] = {}
        for path, here in _walk(state):
            self._by_path.setdefault(path, here)
        #: Starts and ends of the memory in use, in order, so that no tensor is loaded over another.
        self._taken: List[int] = []
        #: Whether that memory may have been written to.
        self.written = False

    def room(self, name: str, kind: str, dtype: str, shape) -> Optional[tuple]:
        """As :func:`room`; None if no tensor or array of this name fits."""
        known = self._by_path.get(name)
        found = None
        if kind == "tensor":
            found = self._tensor(known, dtype, tuple(shape), on_host=True)
        elif kind == "array":
            found = self._array(known, dtype, tuple(shape))
        if found is None or not self._take(found[1], found[1] + bytes_of(shape, dtype)):
            return None
        self.written = True
        return found

    def room_on_device(self, name: str, kind: str, dtype: str, shape):
        """The tensor on a device with this name, type and shape; None if there is none. Does not write to it."""
        found = self._tensor(self._by_path.get(name), dtype, tuple(shape), on_host=False) if kind == "tensor" else None
        if found is None or not self._take(found[1], found[1] + bytes_of(shape, dtype)):
            return None
        return found[0]

    @staticmethod
    def _tensor(known, dtype: str, shape, on_host: bool) -> Optional[tuple]:
        torch = sys.modules.get("torch")
        if torch is None or type(known) not in (torch.Tensor, torch.nn.Parameter):
            return None
        place = known.device.type in (("cpu",) if on_host else ("cuda",))
        plain = known.layout is torch.strided and place and not known.is_quantized
        if not plain or known.is_conj() or known.is_neg() or not known.is_contiguous() or not known.numel():
            return None
        if (_element(known.dtype), tuple(known.shape)) != (dtype, shape):
            return None
        return known.detach(), known.data_ptr()

    @staticmethod
    def _array(known, dtype: str, shape) -> Optional[tuple]:
        numpy = sys.modules.get("numpy")
        if numpy is None or type(known) is not numpy.ndarray or not known.size:
            return None
        fits = known.flags.c_contiguous and known.flags.writeable and known.dtype.isnative
        if not fits or (_NUMPY.get(known.dtype.name), known.shape) != (dtype, shape):
            return None
        return known, known.__array_interface__["data"][0]

    def _take(self, begin: int, end: int) -> bool:
        # Targets may share a storage. Tensors that were saved separately do not both fit into it.
        place = bisect.bisect_right(self._taken, begin)
        if place % 2 or (place < len(self._taken) and self._taken[place] < end):
            return False
        self._taken[place:place] = [begin, end]
        return True


def bytes_of(shape, dtype: str) -> int:
    return math.prod(shape) * _ITEM[dtype]
