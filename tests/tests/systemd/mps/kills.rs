//! At random, units are killed, stopped and restarted, by systemctl and through gpushd. After each
//! round, each target must have one unit, one daemon and one directory. If a daemon was not killed,
//! it must have the same pid as before.
//!
//! The default is eight rounds. `GPUSH_TEST_UNIT_KILLS` sets another number, and `GPUSH_TEST_SEED`
//! repeats a run.

use std::collections::BTreeMap;

use gpush_tests::{
    machine::Machine,
    random::{number, seeded},
};

use super::{machine, ready, target, unit};

/// Each entry is a command, and whether the command ends the daemon. `UNIT` stands for the unit of
/// one of the two daemons.
const DEEDS: [(&str, bool); 9] = [
    ("systemctl kill --kill-whom=main --signal=KILL UNIT", true),
    ("systemctl kill --signal=KILL UNIT", true),
    ("systemctl stop UNIT", true),
    ("systemctl restart UNIT", true),
    ("gpushctl mps restart --force TARGET", true),
    ("systemctl kill --signal=KILL gpushd.service", false),
    ("systemctl restart gpushd.service", false),
    ("systemctl kill --kill-whom=main --signal=KILL UNIT; systemctl kill --signal=KILL gpushd.service", true),
    ("pkill -KILL -f '^/var/lib/gpush-sim/bin/nvidia-cuda-mps-server' || true", false),
];

/// Counts the units, processes and directories of MPS daemons. The test expects two of each.
fn count(machine: &Machine) -> String {
    machine.sh("echo $(systemctl list-units --no-legend --state=active 'gpushd-mps@*' | wc -l) units, \
         $(pgrep -c -f '^/opt/mps/nvidia-cuda-mps-control -f') daemons, \
         $(ls -d /run/gpush-mps/*/spec.json | wc -l) directories, \
         $(systemctl list-units --no-legend --state=failed 'gpush*' | wc -l) failed")
}

#[test]
fn random_unit_kills_leave_no_duplicates_or_leftovers() {
    let Some(machine) = machine("units that are killed at random") else { return };
    let targets = ['g', 'm'].map(|kind| target(&machine, kind));
    let (mut rng, seed) = seeded(20_261_122);
    let times = number("GPUSH_TEST_UNIT_KILLS", 8);
    let mut tried: BTreeMap<&str, u32> = BTreeMap::new();
    for time in 0..times {
        let mut before = ready(&machine);
        before.sort();
        let hit = &targets[rng.usize(..targets.len())];
        let (deed, goes) = DEEDS[rng.usize(..DEEDS.len())];
        let invocation = machine.property("gpushd.service", "InvocationID");
        machine.sh(&deed.replace("UNIT", &unit(hit)).replace("TARGET", hit));
        if deed.contains("gpushd.service") {
            // The old gpushd may still answer before it stops. So wait until systemd shows another
            // invocation.
            machine.await_that("another gpushd", |machine| {
                !["", invocation.as_str()].contains(&machine.property("gpushd.service", "InvocationID").as_str())
            });
        }
        machine.await_that("both are served", |machine| {
            let now = ready(machine);
            let replaced = |one: &(String, u64)| one.0 != unit(hit) || !before.contains(one);
            now.len() == 2 && (!goes || now.iter().all(replaced))
        });
        let mut now = ready(&machine);
        now.sort();
        for (unit_of, pid) in &now {
            assert_eq!(u64::from(machine.main_pid(unit_of)), *pid, "{time}: {deed}: {now:?}");
            if !goes || *unit_of != unit(hit) {
                assert!(before.contains(&(unit_of.clone(), *pid)), "{time}: {deed}: {before:?} {now:?}");
            }
        }
        assert_eq!(count(&machine), "2 units, 2 daemons, 2 directories, 0 failed", "{time}: {deed}");
        *tried.entry(deed).or_default() += 1;
    }
    println!("seed {seed}: {times} times, 0 double daemons, 0 lost adoptions, 0 units left behind");
    for (deed, count) in tried {
        println!("{count:>5}  {deed}");
    }
}
