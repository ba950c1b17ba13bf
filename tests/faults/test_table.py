"""Every row of the fault table, and the tests that try it; a row whose tests are gone fails."""

import ast
from pathlib import Path

import pytest

from tests.attacks import ATTACKS, Tally

TESTS = Path(__file__).parents[1]
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "kill -9 at random times, and between each two steps of a commit": {
        "faults/test_kill.py": (
            "test_the_command_killed_at_random_times",
            "test_the_command_killed_two_hundred_times",
            "test_killed_right_after_every_step_that_changes_the_disk",
            "test_each_round_is_on_record_once",
        ),
        "faults/test_opening.py": ("test_killed_after_every_step_of_opening",),
    },
    "SIGTERM, Ctrl-C in the middle of a fit": {
        "faults/test_stop.py": (
            "test_a_signal_in_a_fit_ends_the_run_and_its_workers",
            "test_workers_do_not_outlive_a_killed_parent",
        ),
        "cli/test_endings.py": (
            "test_stopped_on_a_terminal_it_tidies_up_and_goes_on_to_the_same_bytes",
        ),
    },
    "newest round truncated or one byte flipped; all rounds damaged": {
        "faults/test_damage.py": (
            "test_a_flipped_bit_falls_back_one_round",
            "test_a_truncated_file_falls_back_one_round",
            "test_all_damaged_is_an_error_and_nothing_is_restarted",
        ),
        "faults/test_command.py": (
            "test_a_damaged_newest_round_is_played_again_to_the_same_bytes",
            "test_all_rounds_damaged_is_exit_4_and_nothing_starts_again",
        ),
    },
    "resume with another config; of a finished run; two processes on one directory; newer format": {
        "faults/test_command.py": (
            "test_another_configuration_is_exit_4_naming_the_key",
            "test_a_directory_in_use_is_exit_4_naming_the_process",
            "test_a_newer_format_is_exit_4",
        ),
        "faults/test_damage.py": ("test_another_process_is_named_and_a_dead_one_does_not_block",),
        "cli/test_endings.py": ("test_a_finished_run_that_is_resumed_says_so_and_changes_nothing",),
    },
    "disk full, read-only directory": {
        "faults/test_disk.py": (
            "test_a_full_disk_costs_the_round_and_nothing_else",
            "test_a_file_in_the_place_of_a_directory",
            "test_a_directory_that_goes_away_under_the_run",
        ),
        "faults/test_command.py": (
            "test_a_full_disk_is_exit_4_and_the_run_goes_on_when_there_is_room",
            "test_a_file_in_the_place_of_the_run_directory_is_exit_4",
        ),
    },
    "client raises, never answers, answers late, twice, for another run, from another prior": {
        "federation/test_engines.py": (
            "test_what_happens_to_a_worker_costs_its_client_only",
            "test_a_client_that_raises_costs_itself_in_serial",
            "test_a_client_that_never_answers_costs_itself_in_serial",
        ),
        "defense/test_gate.py": (
            "test_a_client_speaks_for_itself_and_once",
            "test_each_fault_alone_is_refused_with_its_reason",
        ),
        "faults/test_command.py": ("test_a_bad_client_is_named_kept_and_not_folded",),
    },
    "NaN, Inf, 1e38, precision <= 0, shape, sites, float16, empty, random, truncated, 2^40, bomb": {
        "faults/test_updates.py": (
            "test_a_wrong_tensor_is_refused",
            "test_missing_and_extra_sites_and_rows_are_refused",
            "test_truncated_at_every_offset",
            "test_every_flipped_byte_is_refused",
            "test_hostile_bytes_take_no_memory",
            "test_a_pickle_bomb_is_refused_kept_and_never_run",
        ),
        "core/test_bytes.py": ("test_random_bytes_are_malformed",),
    },
    "one of five forges precision x1e6, flips sign, scales, sends zeros": {
        "defense/test_forgers.py": (
            "test_a_forger_stays_within_twice_the_honest_error",
            "test_a_forger_of_rows_alone_stays_within_it",
            "test_two_forgers_of_five_do_not_outvote_three",
        ),
    },
    "all refused; quorum lost": {
        "faults/test_kill.py": ("test_a_lost_quorum_leaves_the_last_round_and_can_be_resumed",),
        "faults/test_command.py": (
            "test_a_lost_quorum_is_exit_5_and_the_run_goes_on_to_the_same_bytes",
        ),
    },
    "client with no data, one sample, one class; lr 1e6": {
        "core/test_client.py": (
            "test_no_data_is_a_failure_with_a_name",
            "test_batch_norm_clients_train_on_any_amount_of_data",
            "test_a_client_that_diverges_says_so_and_sends_nothing",
        ),
        "defense/test_forgers.py": (
            "test_clients_that_learned_nothing_have_no_vote_and_are_not_refused",
        ),
        "faults/test_command.py": ("test_a_learning_rate_that_explodes_sends_nothing",),
    },
    "unknown key, wrong type, out of range, odd YAML, duplicate key, 1e-3, contradictory values": {
        "config/test_refusals.py": (
            "test_a_wrong_file_is_refused_in_one_line",
            "test_a_wrong_flag_is_refused_in_one_line",
        ),
        "config/test_yaml.py": ("test_scalars_are_read_as_they_look",),
        "config/test_conf_files.py": (
            "test_a_mistake_ends_in_one_line_code_2_and_no_run_directory",
        ),
    },
    "data set missing with no network, bad checksum, corrupt image, label out of range": {
        "cli/test_endings.py": ("test_a_data_set_that_is_not_there_is_named_with_its_folder",),
        "datamodules/test_downloads.py": (
            "test_nobody_there_ends_at_once",
            "test_a_wrong_checksum_leaves_nothing_behind",
        ),
        "datamodules/test_sources.py": (
            "test_a_bad_checksum_names_the_folder",
            "test_a_corrupt_image_is_named",
        ),
        "datamodules/test_cache.py": ("test_a_label_out_of_range_names_the_file",),
    },
    "no W&B key, unreachable server, wandb not installed, resumed run": {
        "observe/test_tracking.py": (
            "test_auto_without_a_key_is_offline_and_wandb_itself_is_quiet",
            "test_an_unreachable_server_leaves_an_offline_run_and_the_key_nowhere",
            "test_wandb_not_installed_is_said_once",
            "test_a_resumed_run_keeps_its_id_and_sends_no_round_twice",
        ),
    },
    "a round of another run; a line of metrics.jsonl changed, missing or foreign": {
        "storage/test_binding.py": (
            "test_a_round_of_another_run_is_not_taken",
            "test_a_round_of_a_run_with_the_same_settings_does_not_follow",
            "test_deleted_rounds_are_not_begun_again_without_a_word",
        ),
        "observe/test_records.py": ("test_what_was_changed_is_named_and_put_back",),
        "faults/test_strangers.py": (
            "test_a_changed_line_of_a_finished_run_is_named_and_put_back",
        ),
    },
    "a run directory from a stranger: pipes, links, folders, flipped bits, other types": {
        "faults/test_strangers.py": (
            "test_a_link_is_refused_and_what_it_names_untouched",
            "test_a_pipe_makes_nobody_wait",
            "test_a_folder_in_the_place_of_a_file_is_no_traceback",
            "test_a_flipped_bit_is_named_and_made_again_by_resuming",
            "test_results_of_other_types_are_shown_or_refused_in_one_line",
            "test_a_name_cannot_leave_runs",
        ),
        "core/test_export.py": (
            "test_a_flipped_bit_anywhere_is_named_and_not_served",
            "test_a_card_that_does_not_fit_its_tensors_is_refused_in_one_line",
            "test_tensors_that_do_not_fit_are_refused_in_one_line",
        ),
    },
    "pictures that are none: cut, vector graphics, pipes, too many pixels, names with escapes": {
        "cli/test_predict.py": (
            "test_pictures_that_cannot_be_read_are_named_and_left_out",
            "test_a_vector_graphic_starts_no_interpreter",
            "test_names_of_classes_and_pictures_are_shown_as_they_are",
        ),
        "core/test_images.py": ("test_what_is_no_picture_is_named_in_one_line",),
    },
    "what a client keeps for itself: garbage, other tensors, more images than it was shown": {
        "defense/test_private.py": (
            "test_a_lie_costs_the_liar_its_round_and_nobody_else",
            "test_a_memory_that_lies_is_refused",
            "test_prototypes_at_home_are_finite_and_bring_no_backbone",
        ),
        "storage/test_binding.py": ("test_a_file_of_one_client_costs_that_client_alone",),
        "defense/test_gate.py": (
            "test_who_was_not_asked_costs_nobody",
            "test_what_is_refused_never_takes_more_than_its_room",
        ),
    },
    "a worker that breaks the protocol": {
        "federation/test_protocol.py": (
            "test_one_worker_that_breaks_it_costs_its_client",
            "test_a_flood_after_the_answer_harms_nobody",
        ),
    },
    "closed pipe or terminal, full disk while drawing, damaged tracker file": {
        "faults/test_strangers.py": (
            "test_a_closed_pipe_and_a_closed_terminal_end_no_training",
            "test_a_full_disk_while_the_page_is_written_is_one_line",
            "test_a_damaged_tracker_file_ends_nothing",
        ),
    },
    "every file in conf/": {
        "config/test_conf_files.py": ("test_a_configuration_parses_builds_and_reads_back",)
    },
    "hypothesis: mutated configs, generated scenarios, generated updates": {
        "config/test_mutations.py": (
            "test_a_value_replaced_by_junk",
            "test_bytes_replaced_by_junk",
        ),
        "datamodules/test_partitions.py": ("test_every_image_has_one_owner_among_the_clients",),
        "datamodules/test_scenarios.py": (
            "test_every_client_is_on_one_active_task_and_never_moves_back",
        ),
        "faults/test_updates.py": ("test_whatever_is_folded_is_what_was_asked_for",),
    },
}


def names_in(file: str) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse((TESTS / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("row", [*TABLE, *ATTACKS])
def test_every_row_has_its_tests(row: str) -> None:
    missing = [
        f"{file}::{name}"
        for file, names in {**TABLE, **ATTACKS}[row].items()
        for name in names
        if name not in names_in(file)
    ]
    assert not missing


@pytest.mark.parametrize(
    ("outcome", "more", "counted"),
    [
        ("passed", {}, "held"),
        ("failed", {}, "not held"),
        ("skipped", {}, "not tried"),
        ("skipped", {"wasxfail": "a known limit"}, "not held"),
    ],
)
def test_a_known_limit_counts_as_not_held(outcome: str, more: dict[str, str], counted: str) -> None:
    kind, tests = next(iter(ATTACKS.items()))
    file, names = next(iter(tests.items()))
    nodeid, where = f"tests/{file}::{names[0]}[case]", (file, 1, names[0])
    report = pytest.TestReport(nodeid, where, {}, outcome, None, "call", **more)  # type: ignore[arg-type]
    tally = Tally()
    tally.pytest_runtest_logreport(report)
    assert tally.outcomes == {kind: {counted: 1}}
