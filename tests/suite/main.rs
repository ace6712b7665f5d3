//! The tests that need servers. `tests/run` starts them.
//!
//! The folders are the parts of the crate, and the failures that concern more than one part. One suite
//! runs over both databases of the fence, and one over every lease store; their tests stand here
//! without the name of the database or the store.
//!
//! # Rules and promises, and the tests that fail without them
//!
//! The numbered rules are those of the crate's documentation; the others are promises of the README.
//!
//! | rule or promise | tests |
//! |---|---|
//! | 1. check and write are one transaction | `failures::exclusion::a_guard_in_the_transaction_loses_nothing` |
//! | | `fence::admission::admissions_that_race_on_a_new_resource_commit_in_the_order_of_their_tokens` |
//! | | `fence::admission::a_waiting_writer_is_judged_by_what_its_predecessor_committed` |
//! | | `fence::write::no_number_is_written_twice_under_load` |
//! | 2. admissible is what is above `max_token` | `fence::admission::a_newer_token_is_admitted_and_its_write_is_there` |
//! | | `fence::admission::a_used_token_and_an_older_one_are_refused_with_both_numbers` |
//! | | `fence::admission::a_reusable_token_writes_again_and_outranks_everyone_older` |
//! | | `layer::several::one_stale_token_refuses_the_whole_write_and_the_problem_names_it` |
//! | 3. once answered, older is dead | `layer::writes::a_failed_handler_writes_nothing_keeps_its_token_and_kills_older_ones` |
//! | | `layer::writes::a_panic_writes_nothing_and_kills_older_ones` |
//! | | `layer::writes::a_handler_over_its_time_is_ended_and_kills_older_ones` |
//! | | `layer::writes::a_handler_that_lost_its_connection_kills_older_ones_through_another` |
//! | | `layer::deferred::a_failed_statement_kills_older_ones` |
//! | | `layer::several::a_failed_handler_raises_every_resource` |
//! | | `layer::turned_away::whoever_was_served_kills_older_ones` |
//! | | `layer::turned_away::a_write_that_is_turned_away_moves_nothing` |
//! | 4. no success without a confirmed COMMIT | `failures::lost_answers::an_answer_that_was_lost_is_an_unknown_outcome` |
//! | | `failures::postgres_crash::a_postgres_that_crashes_under_load_loses_no_acknowledged_write` |
//! | | `failures::unreplicated::nothing_is_acknowledged_that_a_synchronous_standby_has_not_got` |
//! | | `fence::commit::a_swallowed_error_is_never_a_false_success` |
//! | | `fence::commit::a_transaction_that_was_ended_by_hand_is_never_a_false_success` |
//! | | `fence::commit::the_server_takes_the_transaction_of_a_holder_that_is_frozen` |
//! | | `layer::deferred::a_commit_that_fails_is_no_success` |
//! | | `layer::false_success::a_deferred_constraint_that_fails_at_commit_is_no_success` |
//! | | `layer::false_success::a_transaction_in_a_spawned_task_is_no_success` |
//! | | `layer::time_limit::a_commit_that_is_under_way_when_the_time_is_over_is_an_unknown_outcome` |
//! | 5. a client that goes away leaves nothing behind | `failures::cancellation::a_thousand_clients_that_go_away_leave_nothing_behind` |
//! | | `fence::abandoned::abandoned_statements_are_ended_though_all_connections_are_taken` |
//! | | `fence::commit::a_dropped_transaction_leaves_nothing_behind` |
//! | | `fence::write::a_statement_that_is_dropped_or_too_slow_does_not_keep_the_lock` |
//! | | `layer::deferred::a_client_that_goes_away_leaves_no_lock_behind` |
//! | | `layer::writes::a_statement_that_was_cut_off_does_not_keep_the_lock` |
//! | 6. tokens never repeat and never go back | `failures::failover::what_an_asynchronous_standby_has_lost_is_outranked` |
//! | | `failures::postgres_crash::an_epoch_survives_a_crash_of_a_postgres_that_does_not_wait_for_its_disk` |
//! | | `failures::restored::what_a_backup_has_forgotten_is_outranked` |
//! | | `lease::etcd_history::a_process_that_starts_after_a_restore_outranks_what_was_granted_before` |
//! | | `lease::etcd_history::a_snapshot_that_is_restored_as_another_cluster` |
//! | | `lease::etcd_history::a_snapshot_that_is_restored_under_the_same_names` |
//! | | `lease::etcd_history::three_nodes_that_are_restored_outrank_what_was_granted_before` |
//! | | `lease::etcd_late::a_blank_clock_that_comes_late_ends_no_epoch` |
//! | | `lease::etcd_late::a_grant_that_comes_into_another_life_is_not_answered` |
//! | | `lease::etcd_late::a_grant_under_a_clock_that_is_gone_has_no_effect` |
//! | | `lease::etcd_late::a_renewal_under_a_clock_that_is_gone_is_lost` |
//! | | `lease::etcd_late::an_epoch_that_comes_late_begins_on_no_other_clock` |
//! | | `lease::etcd_late::what_began_an_epoch_once_begins_it_never_again` |
//! | | `lease::grants::tokens_go_up_in_the_order_of_the_grants` |
//! | | `lease::postgres_durable::tokens_go_up_through_crashes_under_load` |
//! | | `lease::postgres_idle::tokens_go_up_while_idle_rows_are_removed_all_the_time` |
//! | | `lease::quorum_history::a_node_from_an_old_snapshot` |
//! | | `lease::quorum_history::eviction_on_one_node` |
//! | | `lease::quorum_history::flushall_on_one_node_and_on_two` |
//! | | `lease::quorum_history::nodes_that_are_restarted_empty_one_after_the_other` |
//! | | `lease::quorum_history::two_nodes_from_old_snapshots` |
//! | | `lease::quorum_pauses::after_its_keys_were_taken` |
//! | | `lease::quorum_pauses::after_its_token_was_chosen` |
//! | | `lease::quorum_pauses::after_its_token_was_stored_on_a_minority` |
//! | | `lease::quorum_scripts::a_grant_is_sealed_on_a_majority` |
//! | | `lease::quorum_scripts::a_seal_finds_the_lease_that_was_taken_or_nothing` |
//! | | `lease::quorum_scripts::a_seal_fits_to_the_key_that_was_taken_and_to_no_later_one` |
//! | | `lease::quorum_scripts::a_token_is_above_the_clocks_of_a_majority` |
//! | | `lease::quorum_scripts::an_attempt_chooses_one_token` |
//! | | `lease::quorum_scripts::another_token_of_a_lease_is_above_the_one_that_it_has` |
//! | | `lease::quorum_scripts::no_seal_turns_a_clock_back` |
//! | | `lease::quorum_scripts::numbers_are_compared_within_an_epoch` |
//! | | `lease::quorum_scripts::only_nodes_are_sealed_whose_clocks_were_counted` |
//! | | `lease::quorum_scripts::the_lease_id_alone_does_not_make_a_seal_fit` |
//! | | `lease::quorum_scripts::the_store_begins_another_attempt_for_another_token` |
//! | | `lease::quorum_scripts::what_is_taken_is_not_granted` |
//! | | `lease::quorum_scripts_ends::a_key_without_a_token_is_not_renewed` |
//! | | `lease::quorum_scripts_ends::a_lease_from_a_snapshot_is_not_renewed` |
//! | | `lease::quorum_scripts_ends::a_release_ends_what_it_has_found` |
//! | | `lease::quorum_scripts_ends::a_renewal_finds_the_same_token_on_a_majority` |
//! | | `lease::quorum_scripts_ends::a_token_from_a_snapshot_is_not_answered_again` |
//! | | `lease::quorum_scripts_ends::an_attempt_takes_back_what_it_has_left_itself` |
//! | | `lease::quorum_scripts_ends::an_older_attempt_does_not_follow_a_newer_one` |
//! | | `lease::quorum_scripts_loss::a_clock_counts_under_the_history_in_which_it_was_written` |
//! | | `lease::quorum_scripts_loss::a_clock_of_another_history_is_blank_from_the_first_time_on` |
//! | | `lease::quorum_scripts_loss::a_lost_clock_has_not_counted_nothing` |
//! | | `lease::quorum_scripts_loss::a_lost_clock_is_not_passed_over_since_another_is_usable` |
//! | | `lease::quorum_scripts_loss::a_node_that_has_replicas_or_is_one_is_none` |
//! | | `lease::quorum_scripts_loss::a_seal_fits_to_the_history_in_which_the_key_was_taken` |
//! | | `lease::quorum_scripts_loss::a_seal_fits_to_the_incarnation_of_the_clock_when_all_is_flushed` |
//! | | `lease::quorum_scripts_loss::a_seal_fits_to_the_incarnation_of_the_clock_when_that_is_evicted` |
//! | | `lease::quorum_scripts_loss::a_stamp_that_is_older_than_the_clock_does_not_fit` |
//! | | `lease::quorum_scripts_loss::an_epoch_comes_from_the_database` |
//! | | `lease::quorum_scripts_loss::an_epoch_is_asked_for_when_it_is_needed` |
//! | | `lease::redis_cluster::a_killed_master_is_outranked_by_its_replica` |
//! | | `lease::redis_epochs::of_issuers_that_race_for_an_epoch_one_installs_it` |
//! | | `lease::redis_failover::a_failover_of_the_database_that_is_noticed_is_outranked_whatever_redis_loses` |
//! | | `lease::redis_history::a_failover_to_a_replica_that_lags` |
//! | | `lease::redis_history::a_restart_from_an_old_snapshot` |
//! | | `lease::redis_history::eviction` |
//! | | `lease::redis_history::flushall` |
//! | | `lease::redis_memory::a_clock_that_goes_back_within_one_history_is_noticed` |
//! | 7. no safety rests on a clock | `example::stale_writers::a_stale_writer_bounces_on_postgres_and_redis` |
//! | | `example::worker::a_stopped_worker_sees_its_loss_and_its_successors_writes_stand` |
//! | | `example::worker::a_wall_clock_that_jumps_changes_nothing` |
//! | | `failures::outages::a_process_that_is_frozen_in_its_handler_keeps_nobody_waiting_for_long` |
//! | | `lease::quorum_faults::a_node_whose_wall_clock_jumps` |
//! | | `lease::quorum_pauses::after_its_token_was_stored` |
//! | 8. no database, no write; no Redis, no new lease | `example::inventory::writes_go_on_without_redis_but_no_lease_is_granted` |
//! | | `failures::outages::a_database_that_comes_back_needs_no_restart` |
//! | | `fence::database::a_database_that_is_not_there_is_unavailable` |
//! | | `lease::etcd_faults::without_a_majority_nothing_is_granted_and_leases_survive_it` |
//! | | `lease::etcd_faults::without_epochs_no_new_history_is_trusted_and_held_leases_go_on` |
//! | | `lease::quorum_faults::three_nodes_are_killed` |
//! | | `lease::redis_loss::a_redis_that_is_away_is_unavailable_within_the_limit` |
//! | | `lease::redis_loss::without_epochs_no_new_history_is_trusted_and_held_leases_go_on` |
//! | 9. every wait has a limit | `client::http_leases::an_issuer_that_is_silent_or_away_is_unavailable_within_the_limit` |
//! | | `failures::outages::a_database_that_comes_back_needs_no_restart` |
//! | | `fence::admission::a_wait_for_a_connection_ends_with_busy` |
//! | | `fence::admission::a_wait_for_the_lock_ends_with_busy` |
//! | | `layer::requests::each_wrong_body_has_its_answer` |
//! | | `layer::time_limit::with_every_connection_taken_the_answer_leaves_at_the_limit` |
//! | | `lease::line::a_wait_that_runs_out_leaves_the_line` |
//! | | `lease::redis_loss::a_redis_that_is_away_is_unavailable_within_the_limit` |
//! | idempotency keys | `failures::repeated::a_thousand_cut_writes_under_reusable_tokens_are_applied_once_and_answered` |
//! | | `layer::idempotency::a_repeated_write_happens_once_and_is_answered_the_same` |
//! | | `layer::idempotency::the_second_of_two_waits_for_the_first_and_replays_it` |
//! | | `layer::idempotency_records::a_failure_leaves_no_record` |
//! | | `layer::idempotency_records::a_handler_cannot_commit_without_its_record` |
//! | | `layer::idempotency_scope::an_answer_is_for_whoever_has_sent_the_request` |
//! | fenced reads | `failures::lost_update::fenced_reads_lose_none` |
//! | | `layer::fenced_read::a_write_that_comes_in_while_it_reads_is_seen` |
//! | | `layer::fenced_read::a_write_under_way_while_it_reads_is_seen` |
//! | | `layer::fenced_read::nothing_older_lands_behind_a_read` |
//! | announced grants | `failures::lost_update::announced_grants_lose_none` |
//! | | `failures::lost_update::leases_in_postgres_lose_none` |
//! | | `failures::lost_update_processes::a_read_under_a_lease_in_postgres_is_lost_by_neither_process` |
//! | | `lease::announced::a_grant_outranks_older_tokens_before_it_is_answered` |
//! | | `lease::announced::a_grant_waits_for_a_write_in_flight` |
//! | | `lease::announced::of_two_leases_with_one_token_one_is_answered` |
//! | | `lease::announced_above::a_forged_token_concerns_its_resource_alone_on_a_quorum` |
//! | | `lease::announced_above::a_forged_token_concerns_its_resource_alone_on_redis` |
//! | moves from store to store | `lease::etcd_move::holders_live_through_moves_from_store_to_store_and_back` |
//! | signed tokens | `contract::signed::another_implementation_makes_the_same_vectors` |
//! | | `contract::signed::the_functions_take_and_refuse_the_same` |
//! | | `contract::signed::what_is_not_the_issuers_is_refused_with_one_answer` |
//! | | `contract::signed_fuzz::no_bit_of_a_field_can_be_changed` |
//! | | `contract::signed_fuzz::no_bit_of_any_part_can_be_changed` |
//! | | `failures::rotation::a_rotation_under_load_refuses_no_request` |
//! | | `issuer::signed::a_holder_sends_what_the_issuer_has_written_and_needs_no_key` |
//! | | `layer::signed::no_number_out_of_the_blue_closes_a_resource` |
//! | | `layer::signed::verification_comes_before_everything_else` |
//! | secrets | `failures::secrets::nothing_that_is_logged_has_a_secret` |
//! | | `failures::secrets::nothing_that_the_example_logs_has_a_secret` |
//! | | `lease::etcd_secrets::a_user_needs_its_prefix_only_and_its_token_is_renewed` |
//! | | `lease::etcd_secrets::no_lease_id_reaches_etcd_and_what_is_there_is_none` |
//! | | `lease::postgres_durable::no_lease_id_of_the_store_is_in_the_log_of_the_server` |
//! | | `lease::redis_secrets::no_lease_id_reaches_redis_and_what_is_there_is_none` |
//! | the fence as SQL functions | `contract::functions::functions_admit_the_same_sequences` |
//! | | `contract::functions::refusals_are_the_documents_of_the_layer` |
//! | | `fence::functions::an_admission_that_waits_is_judged_by_what_its_predecessor_committed` |
//! | | `fence::functions::temporary_tables_and_search_paths_lead_no_function_astray` |
//! | | `fence::functions::whoever_may_execute_needs_no_right_on_tables_and_nobody_else_may` |
//! | | `failures::psycopg_crowd::the_layer_and_psycopg_exclude_each_other` |
//! | protected tables | `fence::protection::an_admission_is_one_of_the_same_transaction_and_came_first` |
//! | | `fence::protection::each_way_to_write_through_the_crate_is_an_admission` |
//! | | `fence::protection::each_write_needs_the_admission_of_each_resource` |
//! | | `fence::protection_fuzz::nothing_is_written_without_its_admission_and_with_it_all_is` |
//! | | `fence::protection_rights::a_bypass_has_a_reason_and_ends_with_its_transaction` |
//! | | `fence::protection_rights::a_dump_keeps_the_protection_and_revives_no_admission` |
//! | | `fence::protection_rights::search_paths_and_temporary_tables_lead_no_guard_astray` |
//! | | `fence::protection_tables::the_view_has_each_guard_and_what_is_missing` |
//! | | `layer::protected::what_was_not_admitted_is_an_unfenced_write_and_only_the_log_names_it` |
//! | leases as SQL functions | `lease::postgres_durable::no_lease_id_of_the_store_is_in_the_log_of_the_server` |
//! | | `lease::postgres_functions::a_script_takes_a_lease_and_is_stopped_when_it_has_lost_it` |
//! | | `lease::postgres_functions::refusals_are_the_documents_of_the_issuer` |
//! | | `lease::postgres_locks::a_transaction_that_renews_and_then_admits_meets_no_deadlock` |
//! | the OpenAPI document | `openapi::document::the_committed_document_is_what_the_code_makes` |
//! | | `openapi::generated_client::it_acquires_and_writes_and_is_refused` |
//! | | `openapi::schemathesis::it_finds_nothing_on_postgres_with_signed_tokens` |
//! | | `openapi::schemathesis::it_finds_nothing_on_sqlite` |
//! | | `openapi::schemathesis::it_finds_what_a_document_leaves_out` |
//! | | `openapi::schemathesis_server::it_finds_nothing_with_the_secret_of_an_operator` |
//! | | `openapi::schemathesis_server::it_finds_what_a_document_says_of_secrets_and_is_not_so` |
//! | | `server::description::with_secrets_it_says_who_may_ask_and_what_everybody_else_is_answered` |
//! | a database that fails over | `failures::failover::a_synchronous_standby_has_all_that_was_answered` |
//! | | `failures::failover::an_asynchronous_standby_loses_writes_with_their_tokens_and_leases` |
//! | | `failures::old_reads::a_failover_that_nobody_notices_loses_a_write_that_was_acknowledged_after_it` |
//! | | `failures::old_reads::after_a_failover_that_is_noticed_nobody_writes_from_an_old_read` |
//! | | `fence::failover::nothing_is_admitted_on_another_time_line_that_was_admissible_there` |
//! | tokens of other lock servers | `contract::tokens::a_zxid_is_a_token_where_it_is_in_range` |
//! | | `failures::etcd_tokens::a_change_from_etcd_needs_no_step_and_each_layer_refuses_the_other_issuer` |
//! | | `failures::etcd_tokens::a_paused_holder_of_a_lock_in_etcd_is_refused` |
//! | | `failures::etcd_tokens::a_restored_etcd_is_refused_until_its_tokens_begin_above` |
//! | | `failures::zookeeper_tokens::a_change_from_zookeeper_needs_no_step_where_grants_are_announced_and_one_where_not` |
//! | | `failures::zookeeper_tokens::a_paused_holder_of_a_lock_in_zookeeper_is_refused` |
//! | | `failures::zookeeper_tokens::zxids_go_up_through_restarts_and_a_zookeeper_that_was_wiped_is_refused_until_a_reset` |
//! | | `layer::granted::what_was_never_granted_is_refused` |
//! | other databases with Postgres' protocol | `fence::capabilities::a_role_that_may_not_end_sessions_writes_all_the_same` |
//! | | `fence::capabilities::check_and_write_are_one_statement_only_where_rows_have_versions` |
//! | | `fence::capabilities::where_no_session_can_be_ended_its_connection_is_closed` |
//! | | `fence::collisions::a_handler_whose_transaction_collides_is_answered_503_and_claims_nothing` |
//! | | `fence::collisions::an_admission_is_repeated` |
//! | | `fence::collisions::nothing_is_repeated_behind_the_admission` |
//! | a table in partitions | `fence::partitions::nothing_is_lost_and_nothing_dead_comes_alive_while_it_is_divided` |
//! | hooks and tenants | `fence::begin_hook::it_runs_in_each_mode_and_ends_with_the_transaction` |
//! | | `fence::connections::hooks_of_the_pool_see_each_use` |
//! | | `fence::pool_hooks::a_hook_runs_in_the_task_of_the_request` |
//! | | `fence::pool_hooks::what_a_request_sets_is_reset_before_the_next_one` |
//! | | `layer::on_begin::each_tenant_writes_its_own_rows_in_each_mode` |
//! | a quorum goes on with a majority | `lease::quorum_faults::a_node_is_cut_off_and_another_falls_silent` |
//! | | `lease::quorum_faults::a_node_is_slow` |
//! | | `lease::quorum_faults::two_nodes_are_frozen` |
//! | | `lease::quorum_faults::two_nodes_are_killed` |
//! | waiting in line | `lease::etcd_line::lines_leave_nothing_behind` |
//! | | `lease::etcd_line::only_the_first_in_line_asks` |
//! | | `lease::etcd_line::waiters_of_a_process_that_is_cut_off_are_passed_over` |
//! | | `lease::line::a_newcomer_does_not_overtake` |
//! | | `lease::line::a_thousand_waiters_are_served_in_order_though_half_of_them_go_away` |
//! | | `lease::line::waiters_are_served_in_the_order_in_which_they_came` |
//! | | `lease::postgres_line::a_process_that_is_frozen_or_killed_delays_the_next_by_a_moment` |
//! | | `lease::postgres_line::nobody_joins_a_line_while_the_lease_is_being_released` |
//! | | `lease::postgres_line::whoever_joins_behind_a_grant_is_told_when_it_ends` |
//! | | `lease::postgres_processes::a_thousand_waiters_at_two_processes_are_served_in_order` |
//! | | `lease::postgres_processes::those_who_wait_at_a_process_that_is_killed_are_passed_over` |
//! | | `lease::redis_line::lines_leave_nothing_behind` |
//! | | `lease::redis_line::waiters_are_bounded_in_all` |
//! | | `lease::redis_line_loss::waiters_of_an_issuer_that_died_are_skipped_at_once` |
//! | the holder hears of its loss | `client::guard::a_loss_is_never_taken_back` |
//! | | `client::guard::an_end_by_force_reaches_work_and_watchers` |
//! | | `client::guard::its_time_counts_from_before_the_request` |
//! | | `client::loss::a_process_that_slept_past_its_lease_sees_its_loss_first` |
//! | | `client::loss::an_issuer_that_stays_away_costs_the_lease_when_its_time_is_up` |
//! | | `lease::etcd_process::a_process_that_is_paused_past_its_lease_is_told_and_its_write_is_refused` |
//! | the server | `server::access::a_request_needs_a_secret_that_the_server_knows` |
//! | | `server::access::what_operators_do_is_closed_to_holders` |
//! | | `server::guide::psycopg_and_urllib_take_leases_and_the_paused_holder_is_refused` |
//! | | `server::secrets::nothing_that_the_server_shows_has_a_secret` |
//! | | `server::stop::those_who_wait_in_line_are_answered_when_it_stops` |
//! | | `server::tls_postgres::a_postgres_that_the_authority_does_not_vouch_for_is_not_written_to` |
//! | a command under a lease | `server::run::one_runs_at_a_time` |
//! | | `server::run_loss::a_command_that_ignores_term_is_killed` |
//! | | `server::run_loss::a_lease_that_is_lost_stops_the_command_and_its_group` |
//! | | `server::run_loss::what_a_command_leaves_behind_is_stopped_before_the_release` |
//! | the console | `console::chromium_names::names_are_text_wherever_they_stand` |
//! | | `console::chromium_page::a_lease_that_another_one_has_by_now_is_not_broken` |
//! | | `console::feed::a_reader_that_stalls_keeps_nobody_waiting_and_the_next_one_hears_what_it_has_missed` |
//! | | `console::protection::a_page_of_another_site_changes_and_reads_nothing` |

mod client;
mod console;
mod contract;
mod example;
mod failures;
mod fence;
mod issuer;
mod layer;
mod lease;
mod openapi;
mod rules;
mod server;
mod support;
mod traces;
