use proptest::prelude::*;

use super::*;

const PID: i32 = 4711;

fn at(seconds: u64) -> Instant {
    Duration::from_secs(seconds)
}

fn ready() -> Supervisor {
    let mut one = Supervisor::new(Policy::default());
    assert_eq!(one.step(&Event::Wanted(true), at(0)), [Effect::Start]);
    assert_eq!(one.step(&Event::Answers { pid: PID }, at(0)), []);
    one
}

#[test]
fn ended_daemon_restarts_with_backoff_then_is_given_up() {
    let mut one = ready();
    let mut now = at(100);
    let mut pauses = Vec::new();
    assert_eq!(one.step(&Event::Ended, now), []);
    while let State::BackingOff { until } = *one.state() {
        pauses.push((until - now).as_secs());
        if until > now {
            assert_eq!(one.step(&Event::Tick, until - Duration::from_millis(1)), []);
        }
        now = until;
        assert_eq!(one.step(&Event::Tick, now), [Effect::Start]);
        let told = one.step(&Event::Ended, now);
        assert_eq!(told == [Effect::TellGivenUp], *one.state() == State::GivenUp);
    }
    assert_eq!((pauses, one.state()), (vec![0, 1, 2, 4], &State::GivenUp));
    assert_eq!((one.step(&Event::Tick, now + at(9999)), one.due()), (vec![], None));
    assert_eq!(one.step(&Event::StartAnyway, now), [Effect::Start]);
}

#[test]
fn old_failures_do_not_count() {
    let mut one = ready();
    for failure in 1..50 {
        one.step(&Event::Ended, at(failure * 200));
        let State::BackingOff { until } = *one.state() else { panic!("{:?}", one.state()) };
        assert_eq!(one.step(&Event::Tick, until), [Effect::Start]);
        one.step(&Event::Answers { pid: PID }, until);
    }
}

#[test]
fn hung_daemon_restarts_only_after_its_clients_end() {
    let mut one = ready();
    assert_eq!(one.step(&Event::Clients(Some(2)), at(1)), []);
    assert_eq!(one.step(&Event::Silent, at(2)), [], "one silence may come from an open front-end");
    assert_eq!(one.step(&Event::Silent, at(3)), [Effect::TellHung]);
    assert_eq!(one.step(&Event::Answers { pid: PID }, at(4)), [], "it was only slow");
    one.step(&Event::Silent, at(5));
    one.step(&Event::Silent, at(6));
    assert_eq!(one.step(&Event::Clients(Some(0)), at(7)), [Effect::Kill]);
    assert_eq!(one.step(&Event::Ended, at(8)), []);
    assert!(matches!(one.state(), State::BackingOff { .. }));
    let mut rough = Supervisor { policy: Policy { restart_hung_with_clients: true, ..Policy::default() }, ..ready() };
    rough.step(&Event::Clients(Some(2)), at(1));
    rough.step(&Event::Silent, at(2));
    assert_eq!(rough.step(&Event::Silent, at(3)), [Effect::Kill]);
}

#[test]
fn late_daemon_is_gone_before_the_next_start() {
    let mut one = Supervisor::new(Policy::default());
    one.step(&Event::Wanted(true), at(0));
    assert_eq!(one.due(), Some(at(10)));
    assert_eq!(one.step(&Event::Tick, at(10)), [Effect::Kill]);
    assert_eq!((one.step(&Event::Tick, at(100)), one.due()), (vec![], None));
    one.step(&Event::Ended, at(100));
    assert_eq!(one.due(), Some(at(100)));
}

#[test]
fn undesired_daemon_is_drained_then_quit_then_killed() {
    let mut one = ready();
    one.step(&Event::Clients(Some(1)), at(1));
    assert_eq!(one.step(&Event::Wanted(false), at(2)), []);
    assert_eq!(one.step(&Event::Wanted(true), at(3)), [], "wanted again before it left");
    one.step(&Event::Wanted(false), at(4));
    assert_eq!((one.step(&Event::Tick, at(99_999)), one.due()), (vec![], None), "its clients have no deadline");
    assert_eq!(one.step(&Event::Leave(Some(at(300))), at(4)), []);
    assert_eq!(one.step(&Event::Tick, at(303)), []);
    assert_eq!(one.step(&Event::Tick, at(304)), [Effect::Quit]);
    assert_eq!(one.step(&Event::Tick, at(314)), [Effect::Kill]);
    assert_eq!((one.step(&Event::Ended, at(315)), one.state()), (vec![], &State::Stopped));
}

#[test]
fn daemon_drains_until_its_leases_have_ended() {
    let (mut one, now) = (ready(), at(1));
    assert_eq!(one.step(&Event::Leased(true), now), []);
    assert!(one.admits() && !one.serves_leases());
    for event in [Event::Leave(None), Event::Wanted(false)] {
        let mut one = one.clone();
        assert_eq!(one.step(&event, now), [], "no client is connected, but a program may come");
        assert_eq!(*one.state(), State::Draining { pid: PID, until: None, served: true });
        assert!(!one.admits() && one.serves_leases());
        assert_eq!(one.step(&Event::Clients(Some(1)), now), [], "the program of a lease has connected");
        assert_eq!(one.step(&Event::Leased(false), now), [], "its lease is releasing");
        assert!(!one.serves_leases());
        assert_eq!(one.step(&Event::Clients(Some(0)), now), [Effect::Quit]);
    }
    assert_eq!(one.step(&Event::Leave(Some(Duration::ZERO)), now), [Effect::Quit], "a stop with force");
}

#[test]
fn last_drain_deadline_counts() {
    let mut one = ready();
    one.step(&Event::Clients(Some(1)), at(1));
    for (within, due) in
        [(Some(at(8)), Some(at(10))), (Some(at(2)), Some(at(4))), (None, None), (Some(at(9)), Some(at(11)))]
    {
        assert_eq!((one.step(&Event::Leave(within), at(2)), one.due()), (vec![], due), "{within:?}");
        assert_eq!((one.step(&Event::Wanted(false), at(3)), one.due()), (vec![], due), "the deadline is unchanged");
    }
    one.step(&Event::Leave(None), at(4));
    assert_eq!(one.step(&Event::Tick, at(99_999)), []);
    assert_eq!(one.step(&Event::Clients(Some(0)), at(99_999)), [Effect::Quit]);
}

#[test]
fn found_daemon_is_adopted_and_no_other_started() {
    let mut one = Supervisor::new(Policy::default());
    one.step(&Event::Clients(Some(3)), at(0));
    assert_eq!(one.step(&Event::Found { pid: PID }, at(0)), []);
    assert_eq!(one.step(&Event::Wanted(true), at(0)), []);
    assert_eq!(one.step(&Event::Answers { pid: PID }, at(0)), []);
    assert_eq!(one.state(), &State::Ready { pid: PID, silences: 0 });
    // The same is true for a daemon without clients. A daemon that is not desired is not killed
    // only because it was found.
    let mut other = Supervisor::new(Policy::default());
    assert_eq!((other.step(&Event::Found { pid: PID }, at(0)), other.pid()), (vec![], Some(PID)));
    let mut silent = other.clone();
    assert_eq!(silent.step(&Event::Silent, at(0)), [], "it may have clients");
    assert_eq!(silent.step(&Event::Wanted(false), at(0)), []);
    assert_eq!(silent.step(&Event::Clients(Some(0)), at(0)), [Effect::Quit]);
    assert_eq!(other.step(&Event::Clients(Some(0)), at(0)), []);
    assert_eq!(
        (other.step(&Event::Answers { pid: PID }, at(0)), other.admits()),
        (vec![], false),
        "its desired state is unknown"
    );
    assert_eq!(other.step(&Event::Wanted(false), at(0)), [Effect::Quit]);
}

#[test]
fn leftovers_delay_the_start_without_a_failure_count() {
    let mut one = Supervisor::new(Policy::default());
    one.step(&Event::Wanted(true), at(0));
    for second in 0..100 {
        assert_eq!(one.step(&Event::Occupied, at(second)), []);
        assert_eq!(one.step(&Event::Tick, at(second + 1)), [Effect::Start]);
    }
    assert_eq!(one.failures(), 0);
}

#[test]
fn fault_closes_admission_and_ends_no_client() {
    let mut one = ready();
    one.step(&Event::Clients(Some(2)), at(1));
    assert_eq!(one.step(&Event::Fault, at(2)), []);
    assert_eq!((one.step(&Event::Fault, at(3)), one.state()), (vec![], &State::Fault { pid: PID }));
    assert_eq!(one.step(&Event::Answers { pid: PID }, at(4)), []);
    one.step(&Event::Fault, at(5));
    assert_eq!((one.step(&Event::Silent, at(6)), one.state()), (vec![], &State::Hung { pid: PID, silences: SILENCES }));
    assert_eq!(one.step(&Event::Ended, at(7)), []);
    assert!(matches!(one.state(), State::BackingOff { .. }));
}

#[test]
fn replaced_daemon_restarts_at_once_without_a_failure() {
    let mut one = ready();
    one.step(&Event::Clients(Some(2)), at(1));
    assert_eq!(one.step(&Event::Restart, at(2)), [Effect::Quit]);
    assert_eq!(one.step(&Event::Ended, at(3)), [Effect::Start]);
    assert_eq!(one.failures(), 0);
    one.step(&Event::Answers { pid: PID }, at(3));
    one.step(&Event::Clients(Some(1)), at(4));
    assert_eq!(one.step(&Event::Leave(Some(Duration::ZERO)), at(5)), [Effect::Quit]);
    assert_eq!((one.step(&Event::Ended, at(6)), one.state()), (vec![], &State::Stopped));
    assert_eq!(one.step(&Event::Restart, at(7)), [Effect::Start]);
}

#[test]
fn found_daemon_is_unchanged_until_desire_is_known() {
    for look in [Event::Answers { pid: PID }, Event::Silent, Event::Fault] {
        let mut one = Supervisor::new(Policy::default());
        one.step(&Event::Found { pid: PID }, at(0));
        for _ in 0..3 {
            assert_eq!(
                (one.step(&Event::Clients(Some(0)), at(1)), one.step(&look, at(1))),
                (vec![], vec![]),
                "{look:?}"
            );
        }
        assert_eq!((one.pid(), one.is_told(), one.admits()), (Some(PID), false, false));
        assert_eq!(one.may_go_on(), matches!(look, Event::Answers { .. }), "{look:?}");
        assert!(matches!(one.step(&Event::Wanted(false), at(2))[..], [Effect::Quit]));
        assert!(!one.may_go_on());
    }
    // A daemon that never answered is killed when it is desired and is known to have no clients.
    let mut one = Supervisor::new(Policy::default());
    one.step(&Event::Found { pid: PID }, at(0));
    assert_eq!(one.step(&Event::Wanted(true), at(1)), []);
    assert_eq!((one.step(&Event::Silent, at(1)), one.step(&Event::Silent, at(2))), (vec![], vec![]));
    assert_eq!(one.step(&Event::Clients(Some(0)), at(3)), [Effect::Kill]);
}

#[test]
fn busy_control_connection_closes_admission_without_a_kill() {
    let mut one = ready();
    assert_eq!(one.step(&Event::Busy, at(1)), [], "for a moment");
    assert_eq!(one.step(&Event::Busy, at(2)), []);
    for second in 3..100 {
        assert_eq!(
            (one.step(&Event::Clients(Some(0)), at(second)), one.step(&Event::Busy, at(second))),
            (vec![], vec![])
        );
    }
    assert_eq!(one.step(&Event::Answers { pid: PID }, at(100)), []);
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
        let policy = Policy { restart_hung_with_clients: !patient, ..Policy::default() };
        let mut one = Supervisor::new(policy);
        let (mut world, mut now, mut admitted) = (World::default(), at(0), false);
        for (what, later) in happens {
            now += Duration::from_millis(later * 100);
            let event = match what {
                0 => Event::Wanted(true),
                1 => Event::Wanted(false),
                2 if world.alive => Event::Answers { pid: PID },
                3 if world.alive => Event::Silent,
                4 if world.alive => {
                    (world.alive, world.clients) = (false, 0);
                    Event::Ended
                }
                // Clients connect only while they are admitted, and disconnect at any time.
                5 if admitted => {
                    world.clients += 1;
                    Event::Clients(Some(world.clients))
                }
                6 if world.clients > 0 => {
                    world.clients -= 1;
                    Event::Clients(Some(world.clients))
                }
                7 => Event::StartAnyway,
                8 if world.alive => Event::Fault,
                9 => Event::Leave((later < 30).then(|| Duration::from_secs(later))),
                10 if later > 30 => Event::Restart,
                11 if world.alive => Event::Busy,
                12 => {
                    world.leased = later > 20;
                    Event::Leased(world.leased)
                }
                _ => Event::Tick,
            };
            let (drains, deadline) = match one.state() {
                State::Draining { until, .. } => (true, *until),
                _ => (false, None),
            };
            let was_draining = matches!(one.state(), State::Draining { .. } | State::Stopping { .. })
                || matches!(event, Event::Restart | Event::Leave(Some(Duration::ZERO)));
            for effect in one.step(&event, now) {
                match effect {
                    Effect::Start => {
                        prop_assert!(!world.alive, "a second one was started");
                        world.alive = true;
                    }
                    Effect::Kill | Effect::Quit => {
                        let asked = was_draining || !patient;
                        prop_assert!(world.clients == 0 || asked, "{:?} under {} clients", effect, world.clients);
                        let is_over = deadline.is_some_and(|until| until <= now);
                        let ends = matches!(event, Event::Restart | Event::Leave(Some(Duration::ZERO)));
                        prop_assert!(!(world.leased && drains) || is_over || ends, "{:?} under a lease", effect);
                    }
                    Effect::TellGivenUp | Effect::TellHung => {}
                }
            }
            admitted = one.admits() || one.serves_leases();
            let serves = matches!(one.state(), State::Ready { .. });
            prop_assert!(!one.admits() || serves, "{:?}", one.state());
            prop_assert!(!one.serves_leases() || world.leased, "{:?}", one.state());
            // If a daemon is desired but does not run, a next step is scheduled, or the machine has
            // given up.
            if one.wanted() && !world.alive {
                prop_assert!(one.due().is_some() || *one.state() == State::GivenUp, "{:?}", one.state());
            }
        }
    }
}
