//! What an asker may see of other people's processes: that somebody is there, and no more.
//!
//! Pid, user and command line go to the process's owner and to admins. It is done to the readings
//! that everything else is made from, plans and their refusals included, so that no sentence can
//! tell what a field does not.

use gpush_api::{Actor, Blocker, Gpu, Happening, Process};

use crate::auth::Asker;

/// Takes out of a reading what `asker` may not see.
pub(crate) fn gpu(gpu: &mut Gpu, asker: &Asker) {
    if asker.admin && !asker.blind {
        return;
    }
    gpu.cordons.iter_mut().filter_map(|cordon| cordon.by.as_mut()).for_each(|by| actor(by, asker));
    let instances = gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances);
    for instance in instances {
        instance.processes.iter_mut().for_each(|process| hide(process, asker));
        instance.compute.iter_mut().flat_map(|compute| &mut compute.processes).for_each(|p| hide(p, asker));
    }
    gpu.processes.iter_mut().for_each(|process| hide(process, asker));
}

/// Takes the holders out of blockers that everybody may read about.
pub(crate) fn holders(blockers: &mut [Blocker]) {
    blockers.iter_mut().flat_map(|blocker| &mut blocker.holders).for_each(blank);
}

/// Takes out of an operation's author what `asker` may not see: the process that asked for it.
pub(crate) fn actor(actor: &mut Actor, asker: &Asker) {
    if !asker.may_see(Some(actor.uid)) {
        actor.pid = None;
    }
}

/// Takes out of an event what `asker` may not see.
pub(crate) fn event(what: &mut Happening, asker: &Asker) {
    match what {
        Happening::Operation(change) => actor(&mut change.operation.by, asker),
        Happening::Change(change) => change.by.iter_mut().for_each(|by| actor(by, asker)),
        Happening::Stray(change) if !asker.may_see(change.uid) => {
            (change.pid, change.uid, change.user, change.command) = (None, None, None, None);
        }
        // What they hold everybody may read elsewhere.
        Happening::Gpu(_)
        | Happening::Config(_)
        | Happening::Driver(_)
        | Happening::Xid(_)
        | Happening::Mps(_)
        | Happening::Stray(_)
        | Happening::Resync(_) => {}
    }
}

fn hide(process: &mut Process, asker: &Asker) {
    if asker.may_see(process.uid) {
        return;
    }
    blank(process);
}

fn blank(process: &mut Process) {
    process.pid = None;
    process.uid = None;
    process.user = None;
    process.command = None;
}

#[cfg(test)]
mod tests {
    use gpush_api::{ProcessKind, StrayChange, StrayStep};
    use gpush_host::peer::Peer;

    use super::*;

    fn asker(uid: u32, admin: bool) -> Asker {
        Asker { peer: Peer { uid, pid: None, groups: Vec::new(), is_on_this_host: true }, admin, blind: false }
    }

    fn process() -> Process {
        Process {
            pid: Some(4711),
            uid: Some(1000),
            user: Some("alice".to_owned()),
            command: Some("python secret.py".to_owned()),
            kind: ProcessKind::Compute,
            memory_mib: Some(10),
        }
    }

    #[test]
    fn owner_and_admin_see_all_others_only_that_somebody_is_there() {
        for asker in [asker(1000, false), asker(1, true)] {
            let mut seen = process();
            hide(&mut seen, &asker);
            assert_eq!(seen, process());
        }
        let mut seen = process();
        hide(&mut seen, &asker(1001, false));
        assert_eq!(seen, Process { pid: None, uid: None, user: None, command: None, ..process() });
        // A process of unknown owner is nobody's own.
        let mut seen = Process { uid: None, ..process() };
        hide(&mut seen, &asker(1001, false));
        assert_eq!(seen.pid, None);
    }

    #[test]
    fn who_a_stray_was_its_owner_and_admins_hear() {
        let stray = || {
            Happening::Stray(Box::new(StrayChange {
                gpu: 0,
                uuid: "GPU-0".to_owned(),
                device: None,
                pid: Some(4711),
                uid: Some(1000),
                user: Some("alice".to_owned()),
                command: Some("train".to_owned()),
                why: "its user has no share".to_owned(),
                step: StrayStep::Asked,
            }))
        };
        for (asker, sees) in [(asker(0, true), true), (asker(1000, false), true), (asker(1001, false), false)] {
            let mut what = stray();
            event(&mut what, &asker);
            let Happening::Stray(seen) = &what else { panic!("another kind") };
            assert_eq!(what == stray(), sees);
            assert_eq!(seen.pid.is_some() && seen.command.is_some(), sees);
        }
    }
}
