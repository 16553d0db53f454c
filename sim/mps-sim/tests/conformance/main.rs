//! Runs the same checks on NVIDIA's control daemon and on the simulated daemon, with gpush's own
//! protocol crate. So the checks specify the daemon behaviour on which gpush relies.
//!
//! The real daemon needs no GPU, but the real server does. So both daemons use the simulated
//! server, which they find through `PATH`. If the real daemon is not installed, its checks are
//! skipped with a message. The table [`daemon::DIFFERENCES`] lists the differences between
//! versions.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed, in a helper too")]

mod clients;
mod daemon;
mod ear;
mod life;
mod multi_user;
mod servers;
mod settings;

/// Defines a test of each daemon for each check.
macro_rules! on_each {
    ($($which:ident => $variant:ident),* ; $checks:tt) => { $(on_each!(@one $which $variant $checks);)* };
    (@one $which:ident $variant:ident { $($at:ident: $($check:ident)*;)* }) => {
        mod $which {
            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $check() {
                    let which = crate::daemon::Which::$variant;
                    if let Some(setup) = crate::daemon::Setup::of(which, stringify!($check)) {
                        crate::$at::$check(setup).await;
                    }
                }
            )*)*
        }
    };
}

on_each! {
    real => Real, stand_in_555 => StandIn555, stand_in_550 => StandIn550, stand_in_535 => StandIn535;
    {
        settings:
            lock_holder_is_the_process_that_greets
            settings_read_back_as_set
            environment_sets_only_percentage_and_priority
            odd_values_are_parsed_as_recorded
            unknown_command_is_reported
            other_user_cannot_end_the_daemon;
        ear:
            twenty_concurrent_callers_are_answered
            open_front_end_keeps_the_daemon_busy_until_it_ends
            half_open_connection_blocks_the_daemon
            only_holder_of_the_control_connection_is_found
            silent_client_blocks_the_daemon
            front_end_and_socket_give_the_same_answers
            front_end_exit_code_shows_only_a_missing_daemon;
        life:
            quit_ends_the_daemon_and_makes_it_absent
            stopped_process_is_silent
            killed_daemon_leaves_files_and_the_next_starts
            second_daemon_in_a_directory_fails
            path_of_88_bytes_is_too_long
            daemon_continues_without_its_directory
            background_daemon_logs_to_its_directory;
        servers:
            each_command_reports_a_missing_server
            server_is_started_listed_set_and_shut_down
            forced_shutdown_ends_the_server_of_a_client
            server_that_dies_at_start_is_only_logged
            starting_server_is_busy
            fatal_exception_ends_the_server_after_its_clients;
        clients:
            client_starts_its_server_and_is_listed
            client_percentage_can_only_lower_the_default
            only_clients_can_be_terminated
            quit_waits_for_clients_then_interrupts
            killed_server_loses_clients_and_is_replaced
            server_and_clients_survive_a_killed_daemon
            client_of_another_uid_waits_for_the_first;
        multi_user:
            support_of_several_users_is_detected
            clients_of_several_users_share_a_server_of_root;
    }
}
