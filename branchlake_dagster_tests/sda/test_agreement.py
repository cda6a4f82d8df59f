"""Rules across tables and on the list of close approaches, held against cases of each breach."""

import polars as pl

from branchlake_dagster.sda.graph.agreement import find_disagreements
from branchlake_dagster.sda.graph.listing import find_breaches


def test_each_way_to_disagree_is_found() -> None:
    objects = pl.DataFrame(
        {
            "sat_no": [1, 2, 3, 4, 5],
            "state": ["tracked", "stale", "untracked", "tracked", "stale"],
            "epoch": [10, 10, None, None, 10],
        }
    )
    catalogue = pl.DataFrame({"sat_no": [1, 2, 6], "state": ["tracked", "decayed", "tracked"]})
    assert find_disagreements(objects, catalogue).rows() == [
        (2, "stale", "decayed"),  # the catalogue says another state
        (4, "tracked", None),  # tracked, and no elements
        (5, "stale", None),  # it has an epoch, and no elements
        (6, None, "tracked"),  # no object
    ]
    agreeing = objects.filter(pl.col("sat_no").is_in([1, 3]))
    assert find_disagreements(agreeing, catalogue.head(1)).is_empty()
    assert find_disagreements(objects.clear(), catalogue.clear()).is_empty()


def test_each_breach_of_the_list_is_found() -> None:
    catalogue = pl.DataFrame({"sat_no": [1, 2, 3], "epoch": [10, 20, 30]})
    columns = {
        "event_id": pl.String,
        "sat1_object_designator": pl.Int64,
        "sat2_object_designator": pl.Int64,
        "sat1_element_epoch": pl.Int64,
        "sat2_element_epoch": pl.Int64,
        "collision_probability": pl.Float64,
        "max_collision_probability": pl.Float64,
        "no_probability_because": pl.String,
    }
    good = [
        ("a", 1, 2, 10, 20, 0.1, 0.2, None),
        ("b", 1, 2, 10, 20, None, None, "too slow"),
        ("c", 2, 3, 20, 30, 0.2, 0.2, None),
        ("d", 2, 3, 20, 30, 0.2, None, None),  # nothing to compare with
    ]
    bad = [
        ("e", 3, 1, 30, 10, 0.1, 0.2, None),  # the wrong way round
        ("f", 1, 3, 10, 30, 0.1, 0.2, None),  # twice
        ("f", 1, 3, 10, 30, 0.1, 0.2, None),
        ("g", 1, 2, 10, 20, 0.3, 0.2, None),
        ("h", 1, 2, 10, 20, None, 0.2, None),
        ("i", 1, 2, 10, 20, 0.1, 0.2, "and a reason"),
        ("j", 1, 4, 10, 40, 0.1, 0.2, None),  # not in the catalogue
        ("k", 1, 2, 11, 20, 0.1, 0.2, None),  # another element set
    ]
    found = find_breaches(pl.DataFrame(good + bad, schema=columns, orient="row"), catalogue)
    events = {name: sorted(rows["event_id"].to_list()) for name, rows in found.items()}
    assert events == {
        "ordered_and_unique": ["e", "f"],
        "probability_or_reason": ["g", "h", "i"],
        "of_known_objects": ["j", "k"],
    }
    fine = find_breaches(pl.DataFrame(good, schema=columns, orient="row"), catalogue)
    assert all(rows.is_empty() for rows in fine.values())
