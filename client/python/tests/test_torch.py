"""The hooks for PyTorch, with the real PyTorch: automatic under the launcher, and called by the script."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

# A plain DDP script without code for Mainstay.
TRAINING = """
    import os, sys, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=4, num_workers=int(os.environ.get("WORKERS", 0)))
    for batch in loader:
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()
"""


def sections(page) -> set:
    return {name for record in page["records"] for name in record["sections"]}


def test_a_script_without_a_line_of_ours_is_watched(run_job):
    job = run_job(TRAINING + """
    net.eval()
    with torch.no_grad():
        net(batch)
    time.sleep(1.2)
    dist.destroy_process_group()
    """, WORKERS=1)
    assert sorted(job.pages) == [0, 1]
    for page in job.pages.values():
        assert page["claim"]["state"] == "closed" and page["claim"]["claims"] == 1
        assert [record["step"] for record in page["records"]] == [1, 2, 3, 4, 5], "6 steps, the first not told"
        assert sections(page) >= {"data", "forward", "backward", "optimizer"}
        assert page["beat"]["sections"] == []
    one, other = (page["collectives"] for page in job.pages.values())
    assert [group["comm"] for group in one] == [group["comm"] for group in other] and len(one) == 1
    # One bucket per step, and the collectives of DDP's construction.
    assert one[0]["entered"] == other[0]["entered"] >= 6
    assert one[0]["completed"] == one[0]["entered"]


def test_the_rank_that_does_not_enter_a_collective_differs_from_the_one_that_waits(run_job):
    job = run_job(TRAINING + """
    torch.manual_seed(0)
    halves = [dist.new_group([0]), dist.new_group([1])]
    print("groups", flush=True)
    if rank == 0:
        import subprocess
        def collectives(page):
            # In a separate process, because closing the page's file here would release the claim on it.
            code = "import sys; from mainstay import _native; print(_native._testing_read_page(sys.argv[1])['collectives'])"
            told = subprocess.run([sys.executable, "-c", code, page], env={}, capture_output=True, text=True, check=True)
            return eval(told.stdout)
        own = os.environ["MAINSTAY_PAGE"]
        def told_by_both(theirs, ours):
            # Each rank polls its groups twice a second, at different times.
            waiting = [group for group in theirs if group["completed"] < group["entered"] and group["operation"]]
            mine = [group for group in ours for other in waiting if group["comm"] == other["comm"]]
            return len(ours) == 2 and mine and mine[0]["completed"] == mine[0]["entered"] == waiting[0]["completed"]
        for attempt in range(200):
            theirs, ours = collectives(own.replace("rank-0", "rank-1")), collectives(own)
            if told_by_both(theirs, ours):
                break
        print("theirs", theirs, "ours", ours, flush=True)
        (waiting,) = [group for group in theirs if group["completed"] < group["entered"]]
        (mine,) = [group for group in ours if group["comm"] == waiting["comm"]]
        assert waiting["operation"] == ("all_reduce", 4000), waiting
        assert waiting["entered"] == waiting["completed"] + 1 == mine["entered"] + 1, (waiting, mine)
        assert mine["completed"] == mine["entered"]
        # Each rank has a group of its own, which the other rank does not report.
        names = [{group["comm"] for group in told} for told in (ours, theirs)]
        assert len(names[0] & names[1]) == 1 and len(names[0]) == len(names[1]) == 2, names
    dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()
    """)
    assert len(job.pages) == 2


def test_a_script_that_reports_its_steps_is_not_counted_by_hooks(forked):
    pages, _ = forked("""
        import torch, mainstay
        net = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for n in range(100, 104):
            net(torch.ones(2)).sum().backward()
            optimizer.step()
            mainstay.step(n, loss=0.25)
    """, ranks=1)
    assert [record["step"] for record in pages[0]["records"]] == [100, 101, 102, 103]


def test_a_step_by_which_pytorch_creates_the_state_of_an_optimizer_is_none(forked):
    pages, _ = forked("""
        import gc, torch
        from torch.distributed.checkpoint.state_dict import get_state_dict
        net = torch.nn.Linear(2, 2)
        for kind in (torch.optim.AdamW, torch.optim.SGD):
            optimizer = kind(net.parameters(), lr=0.1)
            for _ in range(3):
                get_state_dict(net, optimizer)
                net(torch.ones(2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            del optimizer
            gc.collect()
    """, ranks=1)
    assert [record["step"] for record in pages[0]["records"]] == [1, 2, 3, 4, 5], "6 steps, the first not told"


def test_switched_off_it_does_nothing_at_all(run_job):
    job = run_job("import torch, sys; assert 'mainstay' not in sys.modules", ranks=1, MAINSTAY_TORCH=0)
    assert job.pages[0]["claim"]["state"] == "unclaimed"


def test_a_program_without_torch_is_left_alone(run_job):
    job = run_job("import json, sys; assert 'mainstay' not in sys.modules", ranks=1)
    assert job.pages[0]["claim"]["state"] == "unclaimed"


@pytest.mark.parametrize("kind", ["FullyShardedDataParallel", "fully_shard"])
def test_sharded_models_are_watched_at_their_root(forked, kind):
    pages, _ = forked(f"""
        import torch, torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        dist.init_process_group("gloo")
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        if {kind!r} == "fully_shard":
            for layer in net:
                fully_shard(layer)
            fully_shard(net)
            assert fully_shard.state(net) is not None
        else:
            net[0] = FullyShardedDataParallel(net[0], device_id=torch.device("cpu"))
            net = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
        from mainstay import _torch_sections
        assert [module is net for module in _torch_sections._hooked] == [True]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(4):
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        import time; time.sleep(1.2)
        dist.destroy_process_group()
    """, ranks=2)
    for page in pages.values():
        assert [record["step"] for record in page["records"]] == [1, 2, 3]
        assert sections(page) >= {"forward", "backward", "optimizer"}
        assert sum(group["entered"] for group in page["collectives"]) >= 8


def test_results_are_bit_for_bit_those_without_it(forked, tmp_path):
    ending = f"""
    torch.save([p for p in net.parameters()], {str(tmp_path)!r} + "/" + os.environ["WHICH"] + str(rank))
    dist.destroy_process_group()
    """
    forked(TRAINING + ending, ranks=2, WHICH="on")
    forked(TRAINING + ending, ranks=2, WHICH="off", MAINSTAY_TORCH=0)
    import torch

    for rank in range(2):
        on, off = (torch.load(tmp_path / f"{which}{rank}") for which in ("on", "off"))
        assert all(torch.equal(a, b) for a, b in zip(on, off)) and len(on) == 2


def test_errors_of_the_model_pass_through_and_leave_no_section_open(forked, page):
    forked("""
        import torch, mainstay.torch
        class Broken(torch.nn.Module):
            def forward(self, x):
                raise KeyError("the model's own")
        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                raise IndexError("the optimizer's own")
        net = Broken()
        assert mainstay.torch.watch(net) and mainstay.torch.watch(net)
        for _ in range(20):
            try: net(torch.ones(1))
            except KeyError: pass
            else: raise SystemExit("swallowed")
            try: Optimizer([torch.nn.Parameter(torch.ones(1))], lr=1).step()
            except IndexError: pass
            else: raise SystemExit("swallowed")
        try: torch.ones(1).backward()
        except RuntimeError as error: assert "does not require grad" in str(error)
        mainstay.beat()
    """, page=page, MAINSTAY_TORCH=0)
    assert page.read()["beat"]["sections"] in ([], ["optimizer"])


def test_without_a_page_nothing_is_hooked(python):
    python("""
        import torch
        before = torch.autograd.backward, torch.utils.data.dataloader._BaseDataLoaderIter.__next__
        import mainstay.torch
        assert not mainstay.torch.watch(torch.nn.Linear(1, 1))
        assert before == (torch.autograd.backward, torch.utils.data.dataloader._BaseDataLoaderIter.__next__)
        from torch.optim import optimizer
        assert not optimizer._global_optimizer_pre_hooks
    """)


def test_a_compiled_model_is_not_broken_in_pieces(forked, page):
    forked("""
        import torch, mainstay.torch
        net = torch.nn.Linear(4, 4)
        mainstay.torch.watch(net)
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        for _ in range(3):
            compiled(torch.ones(2, 4)).sum().backward()
        explained = torch._dynamo.explain(net)(torch.ones(2, 4))
        assert explained.graph_break_count == 0, explained
    """, page=page)


# DistributedDataParallel in a single process.
ALONE = """
    import copy, gc, pickle, threading, torch, mainstay.torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mainstay.torch.watch()
"""


def test_a_watched_model_can_be_compiled_copied_and_pickled(forked, page):
    forked(ALONE + """
    from torch.nn.parallel import DistributedDataParallel
    net = DistributedDataParallel(torch.nn.Linear(4, 4))
    compiled = torch.compile(net, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2, 4)).sum().backward()
    watched = torch._dynamo.explain(net)(torch.ones(2, 4)).graph_break_count
    call, DistributedDataParallel.__call__ = DistributedDataParallel.__call__, torch.nn.Module.__call__
    torch._dynamo.reset()
    plain = torch._dynamo.explain(net)(torch.ones(2, 4)).graph_break_count
    assert watched == plain, (watched, plain)
    DistributedDataParallel.__call__ = call
    other = torch.nn.Linear(4, 4)
    mainstay.torch.watch(other)
    for model in (net, other):
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(again(torch.ones(2, 4)), model(torch.ones(2, 4)))
    """, page=page)
    assert page.read()["beat"]["sections"] == []


def test_a_model_that_raises_within_ddp_leaves_its_section(forked, page):
    forked(ALONE + """
    class Broken(torch.nn.Linear):
        def forward(self, x):
            raise KeyError("the model's own")
    net = torch.nn.parallel.DistributedDataParallel(Broken(1, 1))
    try: net(torch.ones(1))
    except KeyError: pass
    else: raise SystemExit("swallowed")
    net.eval()
    try: net(torch.ones(1))
    except KeyError: pass
    mainstay.step(1)
    """, page=page)
    told = page.read()
    assert told["beat"]["sections"] == [] and sections(told) == {"forward", "evaluation"}


def test_only_the_thread_that_trains_is_in_a_section(forked, page):
    forked(ALONE + """
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    beside = threading.Thread(target=lambda: net(torch.ones(1)).sum().backward())
    beside.start()
    beside.join()
    mainstay.step(1)
    """, page=page)
    assert sections(page.read()) == set()


def test_the_steps_of_one_optimizer_count_and_of_the_next_one_when_it_is_gone(forked, page):
    forked(ALONE + """
    def optimizer():
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    lead, other = optimizer(), optimizer()
    for _ in range(3):
        lead.step()
        other.step()
    del lead
    gc.collect()
    other.step()
    """, page=page)
    assert [record["step"] for record in page.read()["records"]] == [1, 2, 3]
