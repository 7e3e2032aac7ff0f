"""Files of lines in parts: nothing is lost below the limit, and above it the rest stays readable and small."""

from raymega.storage.rotated_file import KEEP_EACH, RotatedFile, parts_of, read_lines, thin


def kind_of(line):
    return "step" if line.startswith("step") else ""


def write(path, number, *, most_bytes=10**9):
    file = RotatedFile(path, kind_of=kind_of, part_bytes=1000, most_bytes=most_bytes)
    for step in range(number):
        file.write(f"step {step:06}\n")
        if step % 100 == 0:
            file.write(f"event {step:06}\n")
        file.flush()
    file.close()


def test_lines_are_in_order_over_all_parts_and_a_second_writer_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "metrics.old.jsonl").write_text("not a part\n")
    for _ in range(2):
        write(path, 500)
    steps = [line for line in read_lines(path) if line.startswith("step")]
    assert steps == [f"step {step:06}\n" for step in range(500)] * 2
    parts = parts_of(path)
    assert parts[-1] == path and parts[0].name == "metrics.00001.jsonl" and len(parts) > 10
    assert all(part.stat().st_size < 1100 for part in parts)


def test_parts_beyond_the_limit_keep_events_and_some_of_the_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 20_000, most_bytes=20_000)
    assert sum(part.stat().st_size for part in parts_of(path)) < 20_000
    lines = [*read_lines(path)]
    # every event is there, the newest steps are whole, and steps are in order
    assert sum(line.startswith("event") for line in lines) == 200
    steps = [int(line.split()[1]) for line in lines if line.startswith("step")]
    assert steps == sorted(steps) and steps[-20:] == [*range(19_980, 20_000)]
    assert steps[0] == 0 and len(steps) > 300


def test_part_that_does_not_shrink_keeps_no_other_from_it(tmp_path):
    """Pages of samples may fill a part: from then on the steps of all others were kept, whatever the limit."""
    path = tmp_path / "metrics.jsonl"
    events = "".join(f"event {number:06}\n" for number in range(200))
    (tmp_path / "metrics.00001.jsonl").write_text(events)
    (tmp_path / "metrics.00002.jsonl").write_text(events)
    write(path, 20_000, most_bytes=20_000)
    lines = [*read_lines(path)]
    assert sum(line.startswith("event") for line in lines) == 600
    assert sum(part.stat().st_size for part in parts_of(path)) < 20_000


def test_thinned_part_has_the_first_of_each_ten_lines_of_a_kind(tmp_path):
    path = tmp_path / "part.jsonl"
    path.write_text("".join(f"step {n}\nevent {n}\n" for n in range(25)))
    thin(path, kind_of)
    lines = path.read_text().splitlines()
    assert [line for line in lines if line[0] == "s"] == ["step 0", "step 10", "step 20"]
    assert sum(line[0] == "e" for line in lines) == 25 and KEEP_EACH == 10
