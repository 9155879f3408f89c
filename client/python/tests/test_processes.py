"""The owner of a page: the children of a rank never write for it, however they were started."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_children_do_not_beat(python, page, method):
    done = python(
        f"""
        import multiprocessing, os, mainstay

        def worker(queue):
            import mainstay
            mainstay.step(666, loss=6.0)
            mainstay.beat()
            with mainstay.section("stolen"):
                pass
            queue.put((os.getpid(), mainstay.active(), mainstay.status()["active"]))

        if __name__ == "__main__":
            mainstay.step(1)
            context = multiprocessing.get_context({method!r})
            queue = context.Queue()
            child = context.Process(target=worker, args=(queue,))
            child.start()
            pid, *active = queue.get(timeout=60)
            child.join()
            assert pid != os.getpid() and active == [False, False] and child.exitcode == 0
            assert mainstay.active()
            mainstay.step(2)
            print(os.getpid())
        """,
        page=page,
    )
    read = page.read()
    assert [record["step"] for record in read["records"]] == [1, 2]
    assert all(record["sections"] == {} for record in read["records"])
    assert read["claim"]["pid"] == int(done.stdout) and read["claim"]["claims"] == 1
    assert done.stderr == ""


@pytest.mark.parametrize("end", ["raise ValueError('of the child')", "raise SystemExit(3)", "pass"])
def test_a_forked_childs_end_is_not_the_ranks(python, page, tmp_path, end):
    python(
        f"""
        import os, mainstay
        child = os.fork()
        if child == 0:
            {end}
        else:
            os.waitpid(child, 0)
            assert mainstay.active()
            mainstay.step(1)
            os._exit(0)
        """,
        page=page,
        TORCHELASTIC_ERROR_FILE=tmp_path / "error.json",
    )
    read = page.read()
    assert read["exit_note"] is None and read["claim"]["state"] == "claimed" and read["beat"]["step"] == 1
    assert not (tmp_path / "error.json").exists()


def test_a_program_that_a_rank_runs_does_not_take_its_page(python, page):
    done = python(
        """
        import subprocess, sys, mainstay
        mainstay.step(1)
        tool = "import mainstay, json; mainstay.step(666); print(json.dumps(mainstay.status()))"
        status = __import__("json").loads(subprocess.check_output([sys.executable, "-c", tool]))
        assert not status["active"] and "in use by" in status["refusal"], status
        mainstay.step(2)
        """,
        page=page,
    )
    assert [record["step"] for record in page.read()["records"]] == [1, 2]
    assert done.stderr == ""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_do_not_beat(python, page, method):
    pytest.importorskip("torch")
    python(
        f"""
        import mainstay, torch

        class Data(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, index):
                import mainstay
                mainstay.step(666)
                return float(mainstay.active())

        if __name__ == "__main__":
            loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context={method!r})
            for n, batch in enumerate(loader):
                assert batch.item() == 0.0
                mainstay.step(n)
        """,
        page=page,
    )
    read = page.read()
    assert [record["step"] for record in read["records"]] == list(range(8))
    assert read["claim"]["claims"] == 1


def test_a_new_process_takes_the_page_of_one_that_died(python, page):
    python("import mainstay, os; mainstay.step(1); os._exit(0)", page=page)
    python("import mainstay, os; assert mainstay.active(); mainstay.step(1); os._exit(0)", page=page)
    assert page.read()["claim"]["claims"] == 2
