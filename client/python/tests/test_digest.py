"""Digests: the same bits have the same digest, wherever they are stored and however it is computed."""

from __future__ import annotations

import os
import subprocess

import pytest

import mainstay
from mainstay import _digest, _digest_kernel

numpy = pytest.importorskip("numpy")


def by_definition(arrays) -> int:
    """The definition of the digest, word by word with Python numbers."""
    total = 0
    for number, array in enumerate(arrays):
        content = numpy.ascontiguousarray(array).tobytes()
        words = [content[at : at + 8].ljust(8, bytes(1)) for at in range(0, len(content), 8)]
        first = number << 40
        total += sum(_digest._mix(int.from_bytes(word, "little"), first + at) for at, word in enumerate(words))
        total += _digest._mix(len(content), first + (1 << 40) - 1)
    return total % 2**64


KINDS = ["float32", "float64", "float16", "int8", "uint8", "int64", "bool", "complex64"]


def test_native_code_follows_the_definition():
    draw = numpy.random.default_rng(7)
    arrays = [(draw.random(length) * 100).astype(kind) for kind in KINDS for length in (0, 1, 7, 8, 9, 100)]
    assert int(mainstay.digest(arrays)) == by_definition(arrays)
    assert int(mainstay.digest(numpy.arange(10.0))) == by_definition([numpy.arange(10.0)])


def test_every_bit_counts_and_so_does_every_place():
    content = numpy.zeros(64, dtype=numpy.uint8)
    seen = {int(mainstay.digest([content]))}
    for bit in range(64 * 8):
        changed = content.copy()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(int(mainstay.digest([changed])))
    for length in range(64):
        seen.add(int(mainstay.digest([content[:length]])))
    seen.add(int(mainstay.digest([content, content[:0]])))
    assert len(seen) == 1 + 512 + 64 + 1


def test_objects_without_bits_are_refused():
    with pytest.raises(TypeError):
        mainstay.digest([numpy.array([object()])])


def test_torch_on_the_host_and_by_a_devices_operations_come_to_the_same(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(_digest, "_WORDS", 64)
    draw = torch.Generator().manual_seed(3)
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64):
        for length in (0, 1, 3, 8, 64, 513, 2000):
            tensor = (torch.rand(length, generator=draw) * 100).to(kind)
            expected = by_definition([_digest._plain(tensor, torch).numpy()])
            assert int(mainstay.digest([tensor])) == expected
            device = _digest._on_device(_digest._plain(tensor, torch), 0, torch)
            assert int(device) % 2**64 == expected, (kind, length)
    # A view in the middle of another tensor, reversed.
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    for view in (base.t(), base[1:, 1:], base[:, ::3], base[3]):
        assert int(mainstay.digest([view])) == int(mainstay.digest([view.numpy().copy()]))
        device = _digest._on_device(_digest._plain(view, torch), 0, torch)
        assert int(device) % 2**64 == int(mainstay.digest([view]))
    offset = _digest._plain(base, torch)[4:36]
    assert int(_digest._on_device(offset, 0, torch)) % 2**64 == int(mainstay.digest([offset]))


def test_the_kernel_is_code_that_the_drivers_compiler_takes(tmp_path):
    triton = pytest.importorskip("triton")
    compiler = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas")
    if not os.access(compiler, os.X_OK):
        pytest.skip("this Triton has no ptxas")
    source = tmp_path / "digest.ptx"
    source.write_bytes(_digest_kernel._PTX)
    for card in ("sm_75", "sm_90", "sm_100"):
        subprocess.run([compiler, f"-arch={card}", source, "-o", tmp_path / card], check=True)


def test_a_modules_parameters_and_buffers_count():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    before = int(mainstay.digest(net))
    assert before == int(mainstay.digest(list(net.parameters()) + list(net.buffers())))
    assert before == int(mainstay.digest({str(n): p for n, p in enumerate([*net.parameters(), *net.buffers()])}))
    net[1].running_mean[1] += 1e-7
    assert int(mainstay.digest(net)) != before


def test_replicas_report_the_same_until_a_bit_flips(forked):
    pages, _ = forked("""
        import torch, torch.distributed as dist, mainstay
        dist.init_process_group("gloo")
        torch.manual_seed(1)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        mainstay.report_digest(net.module, every=3)
        for n in range(12):
            net(torch.ones(2, 8)).sum().backward()
            if n == 7 and dist.get_rank() == 1:
                net.module.weight.data.view(torch.int32)[2, 3] ^= 1 << 20
            optimizer.step()
            mainstay.step(n)
    """, ranks=2)
    told = [{record["step"]: record["digest"] for record in page["records"]} for page in pages.values()]
    assert [[step for step, digest in rank.items() if digest is not None] for rank in told] == [[2, 5, 8, 11]] * 2
    assert [told[0][step] == told[1][step] for step in (2, 5, 8, 11)] == [True, True, False, False]


def test_a_digest_of_a_device_goes_with_the_step_eight_later(forked, page):
    forked("""
        import torch, mainstay
        from mainstay import _digest
        tensor = torch.zeros(4, requires_grad=True)
        # As for a tensor on a device: a part that is fetched later.
        _digest.digest = lambda tensors: _digest.Digest(0, [(torch.tensor(41 + int(tensors[0].sum())), None)])
        optimizer = torch.optim.SGD([tensor], lr=1.0)
        handle = mainstay.report_digest([tensor], every=10)
        for n in range(25):
            optimizer.step()
            mainstay.step(n)
        handle.remove()
    """, page=page, MAINSTAY_TORCH=0)
    told = {record["step"]: record["digest"] for record in page.read()["records"] if record["digest"] is not None}
    assert told == {17: 41}
