"""How many attacks and faults the suite tries, and how they end, as one table in the docs.

    python -m tests.attacks                run these tests, write the table into docs/security.md
    python -m tests.attacks --slow         with those marked slow: 200 kills, forgers on whole runs
    python -m tests.attacks kills pictures the lines of these categories alone

An attempt is a case of a test, or as many as it says by `record_property("tried", n)`. One that is
held leaves the result, the other clients and the files outside as the test wants them. Which
attack is tried where stands in `ATTACKS`; `tests/faults/test_table.py` sees that all of it exists.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "security.md"
BEGIN, END = "<!-- begin: python -m tests.attacks -->", "<!-- end -->"
Tests = dict[str, tuple[str, ...]]

ATTACKS: dict[str, Tests] = {
    "kills": {
        "faults/test_kill.py": (
            "test_killed_right_after_every_step_that_changes_the_disk",
            "test_the_command_killed_at_random_times",
            "test_the_command_killed_two_hundred_times",
        ),
        "faults/test_opening.py": (
            "test_killed_after_every_step_of_opening",
            "test_killed_while_another_configuration_takes_the_place_of_a_run_without_rounds",
        ),
        "faults/test_stop.py": (
            "test_a_signal_in_a_fit_ends_the_run_and_its_workers",
            "test_workers_do_not_outlive_a_killed_parent",
        ),
    },
    "damaged files": {
        "faults/test_damage.py": (
            "test_a_flipped_bit_falls_back_one_round",
            "test_a_truncated_file_falls_back_one_round",
            "test_a_missing_file_falls_back_one_round",
            "test_a_damaged_client_file_falls_back_one_round",
            "test_two_damaged_rounds_fall_back_two",
            "test_all_damaged_is_an_error_and_nothing_is_restarted",
            "test_a_round_under_a_wrong_name_is_damaged",
        ),
        "faults/test_disk.py": (
            "test_a_full_disk_costs_the_round_and_nothing_else",
            "test_a_file_in_the_place_of_a_directory",
            "test_a_directory_that_goes_away_under_the_run",
            "test_no_more_room_or_open_files_is_one_line_wherever_it_happens",
        ),
        "storage/test_binding.py": (
            "test_a_round_of_another_run_is_not_taken",
            "test_a_round_of_a_run_with_the_same_settings_does_not_follow",
            "test_all_rounds_of_another_run_are_refused",
            "test_another_configuration_in_its_place_is_found",
            "test_deleted_rounds_are_not_begun_again_without_a_word",
            "test_every_file_a_run_left_has_its_digest",
            "test_a_run_whose_end_is_damaged_is_not_complete",
            "test_a_manifest_with_a_right_digest_and_strange_contents_is_damaged",
            "test_a_state_that_is_none_is_one_line_whatever_its_digest",
            "test_a_record_that_is_none_is_one_line_whatever_its_digest",
            "test_a_late_answer_of_another_name_is_none",
            "test_an_end_of_other_types_is_none",
            "test_a_damaged_manifest_does_not_cost_the_round_after_it",
            "test_a_kept_round_that_is_looked_at_is_whole_or_damaged",
            "test_last_is_the_run_begun_last_whatever_the_clock_says",
        ),
        "observe/test_records.py": (
            "test_a_line_cut_short_by_a_crash_is_replaced",
            "test_what_was_changed_is_named_and_put_back",
        ),
        "core/test_export.py": ("test_a_flipped_bit_anywhere_is_named_and_not_served",),
        "datamodules/test_cache.py": ("test_damage_is_found_said_and_repaired",),
        "cli/test_endings.py": (
            "test_a_run_does_not_go_on_with_a_trainer_that_changes_the_result",
        ),
    },
    "malformed updates": {
        "faults/test_updates.py": (
            "test_a_wrong_tensor_is_refused",
            "test_missing_and_extra_sites_and_rows_are_refused",
            "test_truncated_at_every_offset",
            "test_every_flipped_byte_is_refused",
            "test_hostile_bytes_take_no_memory",
            "test_a_pickle_bomb_is_refused_kept_and_never_run",
            "test_metadata_of_other_types_is_refused",
            "test_whatever_is_folded_is_what_was_asked_for",
        ),
        "defense/test_gate.py": (
            "test_each_fault_alone_is_refused_with_its_reason",
            "test_a_client_speaks_for_itself_and_once",
            "test_a_stray_answer_does_not_cost_the_client_its_own",
            "test_images_are_counted_against_the_roll_call",
            "test_who_was_not_asked_costs_nobody",
            "test_what_is_refused_never_takes_more_than_its_room",
            "test_a_payload_beyond_all_room_is_cut",
            "test_size_comes_before_all_reading",
            "test_updates_carry_no_types_of_their_own",
            "test_a_class_that_no_page_can_print_is_announced_by_nobody",
        ),
        "core/test_late.py": (
            "test_what_comes_too_late_is_refused_by_name",
            "test_what_is_too_large_is_refused_before_it_waits_on_disk",
            "test_only_what_was_asked_may_come_late",
            "test_nobody_counts_twice_by_being_late_again",
        ),
    },
    "forged weights": {
        "defense/test_forgers.py": (
            "test_a_forger_stays_within_twice_the_honest_error",
            "test_so_it_does_where_the_server_goes_further",
            "test_so_it_does_where_factors_are_multiplied",
            "test_a_forger_who_takes_certainty_away_stays_within_it",
            "test_a_forger_of_rows_alone_stays_within_it",
            "test_no_strength_between_honest_and_gross_does_much_more",
            "test_two_forgers_of_five_do_not_outvote_three",
            "test_liars_who_agree_do_bounded_harm",
            "test_a_factor_must_leave_some_precision",
            "test_a_row_far_longer_than_those_of_the_library_is_refused_whoever_else_answers",
            "test_the_owner_of_a_new_class_keeps_its_trust_beside_a_forger",
        ),
        "defense/test_absent.py": ("test_a_forger_is_refused_and_nobody_else",),
        "defense/test_gate.py": (
            "test_a_forger_is_refused_by_the_cap_and_counts_against_the_quorum",
            "test_rows_alone_can_be_forged_and_are_refused",
            "test_an_infinite_influence_is_refused",
        ),
        "defense/test_robust.py": (
            "test_a_liar_among_peers_stands_out",
            "test_one_liar_of_three_is_outvoted_and_two_cannot_judge_each_other",
            "test_one_liar_with_two_classes_turns_nobody_out",
            "test_nothing_that_is_not_finite_is_hidden",
        ),
        "defense/test_rules.py": (
            "test_up_to_f_forgers_leave_every_number_among_the_honest_and_more_do_not",
            "test_multi_krum_leaves_out_the_forgers_alone",
            "test_one_forger_of_five_does_little_under_any_rule",
            "test_rows_are_measured_under_every_rule",
        ),
        "defense/test_rows.py": (
            "test_a_row_of_another_direction_or_length_is_far_out_and_nobody_else",
            "test_rows_under_the_names_of_other_classes_are_far_out",
            "test_a_new_class_told_the_other_way_round_is_found_where_no_row_can_be_compared",
            "test_swapping_two_of_three_classes_is_turning_them",
        ),
        "defense/test_side_doors.py": (
            "test_a_forged_tensor_is_refused_or_moves_no_more_than_honest_ones",
            "test_what_once_went_through_is_refused",
            "test_what_all_others_leave_where_it_was_is_judged",
            "test_a_size_that_nobody_else_has_is_judged",
        ),
        "defense/test_whole_runs.py": (
            "test_a_forger_of_weights_costs_fedbnn_little",
            "test_a_forger_of_weights_costs_linear_heads_little",
            "test_a_forger_of_importances_costs_little",
        ),
    },
    "forged statistics": {
        "defense/test_statistics.py": (
            "test_forged_statistics_are_refused_and_nobody_else",
            "test_images_that_lie_the_other_way_about_their_classes_are_refused",
            "test_invented_features_are_refused",
            "test_images_under_the_names_of_other_classes_are_refused",
            "test_counts_that_are_not_those_announced_are_refused",
            "test_statistics_of_no_images_are_zeros",
            "test_forged_sums_of_fixed_features_are_refused",
            "test_the_server_knows_a_class_that_nobody_else_holds",
            "test_one_liar_of_three_makes_nobody_else_look_far",
            "test_class_means_are_compared_under_every_rule",
            "test_a_class_of_the_liar_alone_is_where_the_server_knows_it",
            "test_a_class_of_the_liar_alone_goes_about_as_far_as_those_of_others",
            "test_few_images_under_the_names_of_other_classes_are_refused",
            "test_a_liar_that_is_refused_costs_no_honest_client_its_vote",
            "test_but_no_further",
        ),
        "defense/test_whole_runs.py": ("test_a_forger_of_statistics_costs_little",),
    },
    "forged signals of FCIL": {
        "methods/baselines/test_fcil.py": (
            "test_one_client_of_five_decides_nothing_however_many_images_it_has",
            "test_a_class_that_is_new_is_a_transition_whatever_one_client_says",
            "test_signals_out_of_range_are_a_defect",
        ),
        "defense/test_whole_runs.py": ("test_a_liar_about_signals_costs_fcil_little",),
    },
    "accounts of privacy": {
        "defense/test_privacy.py": (
            "test_an_account_that_is_none_is_one_line",
            "test_an_account_cannot_forget_what_committed_rounds_spent",
            "test_an_account_goes_on_in_a_branch_and_cannot_forget_it",
            "test_a_round_that_is_begun_again_counts_again_with_noise_of_its_own",
        ),
        "cli/test_privacy.py": (
            "test_an_older_copy_of_the_account_forgets_no_attempt_at_the_next_round",
            "test_a_run_without_a_client_goes_on_with_what_the_other_spent",
        ),
        "storage/test_binding.py": (
            "test_what_was_begun_is_counted_in_the_chain_until_it_is_committed",
        ),
    },
    "clients' private state": {
        "defense/test_private.py": (
            "test_a_lie_costs_the_liar_its_round_and_nobody_else",
            "test_where_nothing_is_kept_nothing_may_be",
            "test_a_memory_that_lies_is_refused",
            "test_prototypes_at_home_are_finite_and_bring_no_backbone",
            "test_a_receipt_is_the_clients_own",
        ),
        "storage/test_binding.py": ("test_a_file_of_one_client_costs_that_client_alone",),
    },
    "hostile workers": {
        "federation/test_protocol.py": (
            "test_one_worker_that_breaks_it_costs_its_client",
            "test_a_flood_after_the_answer_harms_nobody",
            "test_a_worker_that_does_not_read_is_late",
            "test_a_worker_that_begins_otherwise_does_not_start",
        ),
        "federation/test_engines.py": (
            "test_what_happens_to_a_worker_costs_its_client_only",
            "test_an_abandoned_exchange_does_not_answer_the_next_one",
            "test_workers_that_cannot_start_are_an_error_with_its_reason",
            "test_workers_see_no_secret_and_one_thread",
            "test_a_worker_dies_with_its_parent_also_before_it_has_begun",
        ),
    },
    "strangers' files": {
        "faults/test_strangers.py": (
            "test_a_link_is_refused_and_what_it_names_untouched",
            "test_a_pipe_makes_nobody_wait",
            "test_a_folder_in_the_place_of_a_file_is_no_traceback",
            "test_folders_without_end_are_refused",
            "test_nothing_is_written_through_a_hard_link",
            "test_a_file_that_is_far_too_large_is_not_read",
            "test_a_file_that_is_hardly_there_is_not_read",
            "test_a_flipped_bit_is_named_and_made_again_by_resuming",
            "test_a_changed_line_of_a_finished_run_is_named_and_put_back",
            "test_a_damaged_tracker_file_ends_nothing",
            "test_results_that_are_none_are_refused_by_report",
            "test_results_of_other_types_are_shown_or_refused_in_one_line",
            "test_runs_with_other_tasks_are_not_reported_together",
            "test_a_name_cannot_leave_runs",
            "test_a_name_that_no_directory_should_have_is_one_line",
            "test_a_full_disk_while_the_page_is_written_is_one_line",
            "test_a_closed_pipe_and_a_closed_terminal_end_no_training",
        ),
        "core/test_export.py": (
            "test_a_card_cannot_make_loading_call_what_is_no_network",
            "test_loading_imports_and_executes_nothing_that_a_card_names",
            "test_a_network_much_larger_than_its_file_is_not_built",
            "test_loading_never_executes",
            "test_a_card_that_does_not_fit_its_tensors_is_refused_in_one_line",
            "test_tensors_that_do_not_fit_are_refused_in_one_line",
            "test_a_card_nested_without_end_is_refused_in_one_line",
        ),
        "cli/test_audit.py": (
            "test_records_of_a_stranger_are_refused_in_one_line",
            "test_words_of_a_stranger_are_shown_escaped",
            "test_a_picture_of_any_number_of_clients_and_rounds_is_as_large_as_can_be_seen",
        ),
        "cli/test_compare.py": (
            "test_nothing_is_written_where_a_link_in_the_directory_of_a_stranger_leads",
            "test_nor_where_one_in_the_place_of_a_part_of_a_sweep_leads",
            "test_a_pipe_in_the_place_of_a_log_makes_nobody_wait",
        ),
        "cli/test_report.py": (
            "test_a_board_imports_nothing_that_a_stranger_names",
            "test_what_a_stranger_set_is_one_word_of_a_shell",
            "test_an_oracle_imports_nothing_that_a_stranger_names",
        ),
    },
    "pictures": {
        "core/test_images.py": (
            "test_what_is_no_picture_is_named_in_one_line",
            "test_a_pipe_that_takes_the_place_of_a_picture_makes_nobody_wait",
            "test_damaged_bytes_give_pixels_or_one_error",
        ),
        "cli/test_predict.py": (
            "test_pictures_that_cannot_be_read_are_named_and_left_out",
            "test_a_vector_graphic_starts_no_interpreter",
            "test_names_of_classes_and_pictures_are_shown_as_they_are",
            "test_what_cannot_be_predicted_is_named_in_one_line",
        ),
    },
}
"""Category -> file -> tests."""


@dataclass(eq=False)
class Tally:
    """Counts the attempts of every category while pytest runs; a plugin of it."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One case of a test has ended: held, not held, or not tried."""
        if report.when == "call" or report.outcome != "passed":
            outcome = {"passed": "held", "skipped": "not tried"}.get(report.outcome, "not held")
            if report.outcome == "skipped" and hasattr(report, "wasxfail"):
                outcome = "not held"  # a limit that is known is a limit
            tried = int(dict(report.user_properties).get("tried", 1))
            self.outcomes.setdefault(category(report.nodeid), Counter())[outcome] += tried


def category(nodeid: str) -> str:
    """The category of a case of a test."""
    file, _, case = nodeid.removeprefix("tests/").partition("::")
    name = re.split(r"\[", case)[0]
    return next(kind for kind, tests in ATTACKS.items() if name in tests.get(file, ()))


def table(rows: Mapping[str, tuple[int, int]]) -> str:
    """A pipe table of tried and held, a line for each category and one for all of them."""
    lines = ["| what is attacked, or how | tried | held | not held |", "|---|---:|---:|---:|"]
    known = {kind: rows[kind] for kind in ATTACKS if kind in rows}
    known["**all**"] = sum(one for one, _ in known.values()), sum(two for _, two in known.values())
    for kind, (tried, held) in known.items():
        lines.append(f"| {kind} | {tried:,} | {held:,} | {tried - held:,} |")
    return "\n".join(lines) + "\n"


def rows_in(text: str) -> dict[str, tuple[int, int]]:
    """Tried and held of the categories that a table has."""
    cells = re.findall(r"^\| ([^|*]+) \| ([\d,]+) \| ([\d,]+) \|", text, re.MULTILINE)
    return {kind: (_number(tried), _number(held)) for kind, tried, held in cells}


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def tried(kinds: Sequence[str], slow: bool) -> tuple[int, dict[str, tuple[int, int]]]:
    """Run the tests of these categories; the exit code of pytest, and what was tried and held."""
    tally, marked = Tally(), [] if slow else ["-m", "not slow"]
    parts = [(file, names) for kind in kinds for file, names in ATTACKS[kind].items()]
    named = [f"{TESTS / file}::{name}" for file, names in parts for name in names]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *marked, *named], plugins=[tally])
    found = tally.outcomes.items()
    rows = {kind: (one["held"] + one["not held"], one["held"]) for kind, one in found}
    return int(code), rows


def main() -> int:
    """Run the tests and write the table; the exit code is pytest's."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks")
    parser.add_argument("kinds", nargs="*", metavar="CATEGORY", help="only these; all by default")
    parser.add_argument("--slow", action="store_true", help="also the tests marked slow")
    options = parser.parse_args()
    if unknown := [kind for kind in options.kinds if kind not in ATTACKS]:
        parser.error(f"unknown category {unknown[0]!r}; there are {', '.join(ATTACKS)}")
    code, rows = tried(options.kinds or [*ATTACKS], options.slow)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    made = f"{BEGIN}\n{table({**rows_in(old), **rows})}{END}"
    PAGE.write_text(before + made + after, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
