//! One set of checks for NVIDIA's control daemon and for the simulated one, through gpush's own protocol crate. So
//! the behaviour that gpush relies on is specified once, and holds for both.
//!
//! The real daemon needs no GPU, but its server does. So both daemons use the simulated server, found through the
//! PATH. If the real daemon is not installed, its half is skipped with a message. Differences are in a table:
//! [`daemon::DIFFERENCES`].
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed, in a helper too")]

mod clients;
mod daemon;
mod ear;
mod life;
mod multi_user;
mod servers;
mod settings;

/// Defines a test of each check for each daemon.
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
            the_daemon_is_who_holds_the_lock_and_who_greets
            what_is_set_is_read_back
            the_environment_sets_percentage_and_priority_alone
            odd_values_are_taken_as_recorded
            what_is_not_known_is_said
            a_stranger_may_not_end_it;
        ear:
            twenty_who_ask_at_once_are_all_answered
            somebody_at_a_prompt_makes_it_busy_and_it_answers_when_he_is_gone
            a_half_open_peer_stops_it_until_it_goes
            whoever_has_its_ear_is_found_and_no_server_or_client_is
            a_client_that_says_nothing_when_it_is_served_stops_it
            the_front_end_is_heard_as_the_socket_is
            the_front_end_says_nothing_by_its_status;
        life:
            a_daemon_that_is_gone_is_absent_and_one_that_is_told_ends
            one_that_stands_still_is_silent
            one_that_is_killed_leaves_its_files_and_the_next_works
            there_is_one_for_a_directory
            a_path_of_87_bytes_and_one_of_88
            its_directory_may_be_deleted_under_it
            in_the_background_it_logs_to_its_directory;
        servers:
            without_a_server_each_command_says_so
            a_server_is_started_listed_set_and_shut_down
            a_server_that_is_forced_ends_under_its_client
            a_server_that_dies_at_once_is_gone_without_a_word
            a_server_that_is_not_ready_is_busy
            a_fatal_exception_ends_the_server_when_its_clients_have_gone;
        clients:
            a_client_starts_its_server_and_is_listed
            its_own_percentage_only_lowers
            a_client_is_terminated_and_others_are_not_known
            quit_waits_for_clients_and_then_interrupts
            a_killed_server_takes_its_clients_and_the_next_gets_another
            a_killed_daemon_leaves_its_server_to_its_clients
            another_uid_waits_until_the_first_has_gone;
        multi_user:
            support_of_several_users_is_detected
            clients_of_several_users_share_roots_server;
    }
}
