use proptest::prelude::*;

use super::*;

const PID: i32 = 4711;

fn at(seconds: u64) -> Instant {
    Duration::from_secs(seconds)
}

fn ready() -> Supervisor {
    let mut one = Supervisor::new(SupervisorPolicy::default());
    assert_eq!(one.step(&SupervisorEvent::Wanted(true), at(0)), [SupervisorEffect::Start]);
    assert_eq!(one.step(&SupervisorEvent::Answers { pid: PID }, at(0)), []);
    one
}

#[test]
fn ended_daemon_restarts_with_backoff_then_is_given_up() {
    let mut one = ready();
    let mut now = at(100);
    let mut pauses = Vec::new();
    assert_eq!(one.step(&SupervisorEvent::Ended, now), []);
    while let SupervisorState::BackingOff { until } = *one.state() {
        pauses.push((until - now).as_secs());
        if until > now {
            assert_eq!(one.step(&SupervisorEvent::Tick, until - Duration::from_millis(1)), []);
        }
        now = until;
        assert_eq!(one.step(&SupervisorEvent::Tick, now), [SupervisorEffect::Start]);
        let reported = one.step(&SupervisorEvent::Ended, now);
        assert_eq!(reported == [SupervisorEffect::ReportGivenUp], *one.state() == SupervisorState::GivenUp);
    }
    assert_eq!((pauses, one.state()), (vec![0, 1, 2, 4], &SupervisorState::GivenUp));
    assert_eq!((one.step(&SupervisorEvent::Tick, now + at(9999)), one.due()), (vec![], None));
    assert_eq!(one.step(&SupervisorEvent::ForceStart, now), [SupervisorEffect::Start]);
}

#[test]
fn old_failures_do_not_count() {
    let mut one = ready();
    for failure in 1..50 {
        one.step(&SupervisorEvent::Ended, at(failure * 200));
        let SupervisorState::BackingOff { until } = *one.state() else { panic!("{:?}", one.state()) };
        assert_eq!(one.step(&SupervisorEvent::Tick, until), [SupervisorEffect::Start]);
        one.step(&SupervisorEvent::Answers { pid: PID }, until);
    }
}

#[test]
fn hung_daemon_restarts_only_after_its_clients_end() {
    let mut one = ready();
    assert_eq!(one.step(&SupervisorEvent::Clients(Some(2)), at(1)), []);
    assert_eq!(one.step(&SupervisorEvent::Silent, at(2)), [], "one silence may come from an open front-end");
    assert_eq!(one.step(&SupervisorEvent::Silent, at(3)), [SupervisorEffect::ReportHung]);
    assert_eq!(one.step(&SupervisorEvent::Answers { pid: PID }, at(4)), [], "it was only slow");
    one.step(&SupervisorEvent::Silent, at(5));
    one.step(&SupervisorEvent::Silent, at(6));
    assert_eq!(one.step(&SupervisorEvent::Clients(Some(0)), at(7)), [SupervisorEffect::Kill(KillReason::Hung)]);
    assert_eq!(one.step(&SupervisorEvent::Ended, at(8)), []);
    assert!(matches!(one.state(), SupervisorState::BackingOff { .. }));
    let mut rough = Supervisor {
        policy: SupervisorPolicy { restart_hung_with_clients: true, ..SupervisorPolicy::default() },
        ..ready()
    };
    rough.step(&SupervisorEvent::Clients(Some(2)), at(1));
    rough.step(&SupervisorEvent::Silent, at(2));
    assert_eq!(rough.step(&SupervisorEvent::Silent, at(3)), [SupervisorEffect::Kill(KillReason::Hung)]);
}

#[test]
fn late_daemon_is_gone_before_the_next_start() {
    let mut one = Supervisor::new(SupervisorPolicy::default());
    one.step(&SupervisorEvent::Wanted(true), at(0));
    assert_eq!(one.due(), Some(at(10)));
    assert_eq!(one.step(&SupervisorEvent::Tick, at(10)), [SupervisorEffect::Kill(KillReason::NotStarted)]);
    assert_eq!((one.step(&SupervisorEvent::Tick, at(100)), one.due()), (vec![], None));
    one.step(&SupervisorEvent::Ended, at(100));
    assert_eq!(one.due(), Some(at(100)));
}

#[test]
fn undesired_daemon_is_drained_then_quit_then_killed() {
    let mut one = ready();
    one.step(&SupervisorEvent::Clients(Some(1)), at(1));
    assert_eq!(one.step(&SupervisorEvent::Wanted(false), at(2)), []);
    assert_eq!(one.step(&SupervisorEvent::Wanted(true), at(3)), [], "wanted again before it left");
    one.step(&SupervisorEvent::Wanted(false), at(4));
    assert_eq!(
        (one.step(&SupervisorEvent::Tick, at(99_999)), one.due()),
        (vec![], None),
        "its clients have no deadline"
    );
    assert_eq!(one.step(&SupervisorEvent::Leave(Some(at(300))), at(4)), []);
    assert_eq!(one.step(&SupervisorEvent::Tick, at(303)), []);
    assert_eq!(one.step(&SupervisorEvent::Tick, at(304)), [SupervisorEffect::Quit]);
    assert_eq!(one.step(&SupervisorEvent::Tick, at(314)), [SupervisorEffect::Kill(KillReason::NotStopped)]);
    assert_eq!((one.step(&SupervisorEvent::Ended, at(315)), one.state()), (vec![], &SupervisorState::Stopped));
}

#[test]
fn daemon_drains_until_its_leases_have_ended() {
    let (mut one, now) = (ready(), at(1));
    assert_eq!(one.step(&SupervisorEvent::Leased(true), now), []);
    assert!(one.admits() && !one.serves_leases());
    for event in [SupervisorEvent::Leave(None), SupervisorEvent::Wanted(false)] {
        let mut one = one.clone();
        assert_eq!(one.step(&event, now), [], "no client is connected, but a program may come");
        assert_eq!(*one.state(), SupervisorState::Draining { pid: PID, until: None, served: true });
        assert!(!one.admits() && one.serves_leases());
        assert_eq!(one.step(&SupervisorEvent::Clients(Some(1)), now), [], "the program of a lease has connected");
        assert_eq!(one.step(&SupervisorEvent::Leased(false), now), [], "its lease is releasing");
        assert!(!one.serves_leases());
        assert_eq!(one.step(&SupervisorEvent::Clients(Some(0)), now), [SupervisorEffect::Quit]);
    }
    assert_eq!(
        one.step(&SupervisorEvent::Leave(Some(Duration::ZERO)), now),
        [SupervisorEffect::Quit],
        "a stop with force"
    );
}

#[test]
fn last_drain_deadline_counts() {
    let mut one = ready();
    one.step(&SupervisorEvent::Clients(Some(1)), at(1));
    for (within, due) in
        [(Some(at(8)), Some(at(10))), (Some(at(2)), Some(at(4))), (None, None), (Some(at(9)), Some(at(11)))]
    {
        assert_eq!((one.step(&SupervisorEvent::Leave(within), at(2)), one.due()), (vec![], due), "{within:?}");
        assert_eq!(
            (one.step(&SupervisorEvent::Wanted(false), at(3)), one.due()),
            (vec![], due),
            "the deadline is unchanged"
        );
    }
    one.step(&SupervisorEvent::Leave(None), at(4));
    assert_eq!(one.step(&SupervisorEvent::Tick, at(99_999)), []);
    assert_eq!(one.step(&SupervisorEvent::Clients(Some(0)), at(99_999)), [SupervisorEffect::Quit]);
}

#[test]
fn found_daemon_is_adopted_and_no_other_started() {
    let mut one = Supervisor::new(SupervisorPolicy::default());
    one.step(&SupervisorEvent::Clients(Some(3)), at(0));
    assert_eq!(one.step(&SupervisorEvent::Found { pid: PID }, at(0)), []);
    assert_eq!(one.step(&SupervisorEvent::Wanted(true), at(0)), []);
    assert_eq!(one.step(&SupervisorEvent::Answers { pid: PID }, at(0)), []);
    assert_eq!(one.state(), &SupervisorState::Ready { pid: PID, silences: 0 });
    // A found daemon is adopted even if it has no clients. If that daemon is not desired, it is
    // asked to end, and is not killed.
    let mut other = Supervisor::new(SupervisorPolicy::default());
    assert_eq!((other.step(&SupervisorEvent::Found { pid: PID }, at(0)), other.pid()), (vec![], Some(PID)));
    let mut silent = other.clone();
    assert_eq!(silent.step(&SupervisorEvent::Silent, at(0)), [], "it may have clients");
    assert_eq!(silent.step(&SupervisorEvent::Wanted(false), at(0)), []);
    assert_eq!(silent.step(&SupervisorEvent::Clients(Some(0)), at(0)), [SupervisorEffect::Quit]);
    assert_eq!(other.step(&SupervisorEvent::Clients(Some(0)), at(0)), []);
    assert_eq!(
        (other.step(&SupervisorEvent::Answers { pid: PID }, at(0)), other.admits()),
        (vec![], false),
        "its desired state is unknown"
    );
    assert_eq!(other.step(&SupervisorEvent::Wanted(false), at(0)), [SupervisorEffect::Quit]);
}

#[test]
fn leftovers_delay_the_start_without_a_failure_count() {
    let mut one = Supervisor::new(SupervisorPolicy::default());
    one.step(&SupervisorEvent::Wanted(true), at(0));
    for second in 0..100 {
        assert_eq!(one.step(&SupervisorEvent::Occupied, at(second)), []);
        assert_eq!(one.step(&SupervisorEvent::Tick, at(second + 1)), [SupervisorEffect::Start]);
    }
    assert_eq!(one.failures(), 0);
}

#[test]
fn fault_closes_admission_and_ends_no_client() {
    let mut one = ready();
    one.step(&SupervisorEvent::Clients(Some(2)), at(1));
    assert_eq!(one.step(&SupervisorEvent::Fault, at(2)), []);
    assert_eq!((one.step(&SupervisorEvent::Fault, at(3)), one.state()), (vec![], &SupervisorState::Fault { pid: PID }));
    assert_eq!(one.step(&SupervisorEvent::Answers { pid: PID }, at(4)), []);
    one.step(&SupervisorEvent::Fault, at(5));
    assert_eq!(
        (one.step(&SupervisorEvent::Silent, at(6)), one.state()),
        (vec![], &SupervisorState::Hung { pid: PID, silences: SILENCES })
    );
    assert_eq!(one.step(&SupervisorEvent::Ended, at(7)), []);
    assert!(matches!(one.state(), SupervisorState::BackingOff { .. }));
}

#[test]
fn replaced_daemon_restarts_at_once_without_a_failure() {
    let mut one = ready();
    one.step(&SupervisorEvent::Clients(Some(2)), at(1));
    assert_eq!(one.step(&SupervisorEvent::Restart, at(2)), [SupervisorEffect::Quit]);
    assert_eq!(one.step(&SupervisorEvent::Ended, at(3)), [SupervisorEffect::Start]);
    assert_eq!(one.failures(), 0);
    one.step(&SupervisorEvent::Answers { pid: PID }, at(3));
    one.step(&SupervisorEvent::Clients(Some(1)), at(4));
    assert_eq!(one.step(&SupervisorEvent::Leave(Some(Duration::ZERO)), at(5)), [SupervisorEffect::Quit]);
    assert_eq!((one.step(&SupervisorEvent::Ended, at(6)), one.state()), (vec![], &SupervisorState::Stopped));
    assert_eq!(one.step(&SupervisorEvent::Restart, at(7)), [SupervisorEffect::Start]);
}

#[test]
fn found_daemon_is_unchanged_until_desire_is_known() {
    for look in [SupervisorEvent::Answers { pid: PID }, SupervisorEvent::Silent, SupervisorEvent::Fault] {
        let mut one = Supervisor::new(SupervisorPolicy::default());
        one.step(&SupervisorEvent::Found { pid: PID }, at(0));
        for _ in 0..3 {
            assert_eq!(
                (one.step(&SupervisorEvent::Clients(Some(0)), at(1)), one.step(&look, at(1))),
                (vec![], vec![]),
                "{look:?}"
            );
        }
        assert_eq!((one.pid(), one.is_desired_known(), one.admits()), (Some(PID), false, false));
        assert_eq!(one.keeps_access(), matches!(look, SupervisorEvent::Answers { .. }), "{look:?}");
        assert!(matches!(one.step(&SupervisorEvent::Wanted(false), at(2))[..], [SupervisorEffect::Quit]));
        assert!(!one.keeps_access());
    }
    // A daemon that never answered is killed when it is desired and is known to have no clients.
    let mut one = Supervisor::new(SupervisorPolicy::default());
    one.step(&SupervisorEvent::Found { pid: PID }, at(0));
    assert_eq!(one.step(&SupervisorEvent::Wanted(true), at(1)), []);
    assert_eq!(
        (one.step(&SupervisorEvent::Silent, at(1)), one.step(&SupervisorEvent::Silent, at(2))),
        (vec![], vec![])
    );
    assert_eq!(one.step(&SupervisorEvent::Clients(Some(0)), at(3)), [SupervisorEffect::Kill(KillReason::Hung)]);
}

#[test]
fn busy_control_connection_closes_admission_without_a_kill() {
    let mut one = ready();
    assert_eq!(one.step(&SupervisorEvent::Busy, at(1)), [], "for a moment");
    assert_eq!(one.step(&SupervisorEvent::Busy, at(2)), []);
    for second in 3..100 {
        assert_eq!(
            (one.step(&SupervisorEvent::Clients(Some(0)), at(second)), one.step(&SupervisorEvent::Busy, at(second))),
            (vec![], vec![])
        );
    }
    assert_eq!(one.step(&SupervisorEvent::Answers { pid: PID }, at(100)), []);
}

/// The state of the real daemon.
#[derive(Debug, Default)]
struct World {
    alive: bool,
    clients: usize,
    leased: bool,
}

proptest! {
    /// Checks for any order of events: there are never two daemons. Users are admitted only to a
    /// daemon that serves. Without a request, a daemon is never killed while it has clients, or
    /// while it drains under a lease. The machine always continues towards the desired state.
    #[test]
    fn daemon_is_never_doubled_nor_killed_with_clients(
        happens in proptest::collection::vec((0_u8..14, 0_u64..40), 1..300),
        patient in any::<bool>(),
    ) {
        let policy = SupervisorPolicy { restart_hung_with_clients: !patient, ..SupervisorPolicy::default() };
        let mut one = Supervisor::new(policy);
        let (mut world, mut now, mut admitted) = (World::default(), at(0), false);
        for (what, later) in happens {
            now += Duration::from_millis(later * 100);
            let event = match what {
                0 => SupervisorEvent::Wanted(true),
                1 => SupervisorEvent::Wanted(false),
                2 if world.alive => SupervisorEvent::Answers { pid: PID },
                3 if world.alive => SupervisorEvent::Silent,
                4 if world.alive => {
                    (world.alive, world.clients) = (false, 0);
                    SupervisorEvent::Ended
                }
                // Clients connect only while they are admitted, and disconnect at any time.
                5 if admitted => {
                    world.clients += 1;
                    SupervisorEvent::Clients(Some(world.clients))
                }
                6 if world.clients > 0 => {
                    world.clients -= 1;
                    SupervisorEvent::Clients(Some(world.clients))
                }
                7 => SupervisorEvent::ForceStart,
                8 if world.alive => SupervisorEvent::Fault,
                9 => SupervisorEvent::Leave((later < 30).then(|| Duration::from_secs(later))),
                10 if later > 30 => SupervisorEvent::Restart,
                11 if world.alive => SupervisorEvent::Busy,
                12 => {
                    world.leased = later > 20;
                    SupervisorEvent::Leased(world.leased)
                }
                _ => SupervisorEvent::Tick,
            };
            let (drains, deadline) = match one.state() {
                SupervisorState::Draining { until, .. } => (true, *until),
                _ => (false, None),
            };
            let was_draining = matches!(one.state(), SupervisorState::Draining { .. } | SupervisorState::Stopping { .. })
                || matches!(event, SupervisorEvent::Restart | SupervisorEvent::Leave(Some(Duration::ZERO)));
            for effect in one.step(&event, now) {
                match effect {
                    SupervisorEffect::Start => {
                        prop_assert!(!world.alive, "a second one was started");
                        world.alive = true;
                    }
                    SupervisorEffect::Kill(_) | SupervisorEffect::Quit => {
                        let asked = was_draining || !patient;
                        prop_assert!(world.clients == 0 || asked, "{:?} under {} clients", effect, world.clients);
                        let is_over = deadline.is_some_and(|until| until <= now);
                        let ends = matches!(event, SupervisorEvent::Restart | SupervisorEvent::Leave(Some(Duration::ZERO)));
                        prop_assert!(!(world.leased && drains) || is_over || ends, "{:?} under a lease", effect);
                    }
                    SupervisorEffect::ReportGivenUp | SupervisorEffect::ReportHung => {}
                }
            }
            admitted = one.admits() || one.serves_leases();
            let serves = matches!(one.state(), SupervisorState::Ready { .. });
            prop_assert!(!one.admits() || serves, "{:?}", one.state());
            prop_assert!(!one.serves_leases() || world.leased, "{:?}", one.state());
            // If a daemon is desired but does not run, a next step is scheduled, or the machine has
            // given up.
            if one.is_desired() && !world.alive {
                prop_assert!(one.due().is_some() || *one.state() == SupervisorState::GivenUp, "{:?}", one.state());
            }
        }
    }
}
