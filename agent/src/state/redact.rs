//! Removes from responses what a viewer may not see. All functions use the rule in [`Viewer::may_see`]; docs/api.md
//! lists what they remove.
//!
//! Only the owner of a process and administrators see its pid, uid, user and command line. Other users see only the
//! state of an MPS server, and only the fields of a lease that [`gpush_api::Lease::redact`] keeps. gpushd makes plans
//! and errors from GPUs whose private details are already removed, so their texts do not contain these details.

use gpush_api::{
    Actor, ApiError, Blocker, ConfigView, EventPayload, Gpu, Holder, MpsClient, MpsDaemon, MpsServer, Process,
};

use crate::requests::caller::Viewer;

/// Removes from a GPU what `viewer` may not see.
pub(crate) fn gpu(gpu: &mut Gpu, viewer: Viewer) {
    if matches!(viewer, Viewer::Admin | Viewer::Log) {
        return;
    }
    if let Some(one) = &mut gpu.overridden {
        actor(&mut one.by, viewer);
    }
    gpu.cordons.iter_mut().filter_map(|cordon| cordon.by.as_mut()).for_each(|by| actor(by, viewer));
    let instances = gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances);
    for instance in instances {
        instance.processes.iter_mut().for_each(|process| hide(process, viewer));
        instance.compute.iter_mut().flat_map(|compute| &mut compute.processes).for_each(|p| hide(p, viewer));
    }
    gpu.processes.iter_mut().for_each(|process| hide(process, viewer));
    gpu.unleased.iter_mut().for_each(|one| hide(&mut one.process, viewer));
    gpu.blocked_by = std::mem::take(&mut gpu.blocked_by).into_iter().map(|one| holder(one, viewer)).collect();
}

/// Removes from a holder of a GPU what `viewer` may not see.
pub(crate) fn holder(holder: Holder, viewer: Viewer) -> Holder {
    // Every user may see kernel modules and leases, which have no pid.
    if holder.pid.is_none() || viewer.may_see(holder.uid) { holder } else { blank_holder(holder) }
}

/// Removes pid, uid, user and command of a holder, because only its user and administrators may see these details. Keeps
/// the unit only if it is a service of the host: the name of another unit may contain a uid or the name of a project.
pub(crate) fn blank_holder(holder: Holder) -> Holder {
    let unit = holder.service().is_some().then(|| holder.unit.clone()).flatten();
    Holder { pid: None, uid: None, user: None, command: None, unit, ..holder }
}

/// Removes pid, uid, user and command of processes from a response that every user may read.
pub(crate) fn holders(blockers: &mut [Blocker]) {
    // A holder without a pid is a lease, which every user may see.
    let holders = blockers.iter_mut().flat_map(|blocker| &mut blocker.holders);
    holders.filter(|holder| holder.pid.is_some()).for_each(blank);
}

/// Removes the pid of an actor if `viewer` may not see it.
pub(crate) fn actor(actor: &mut Actor, viewer: Viewer) {
    if !viewer.may_see(Some(actor.uid)) {
        actor.pid = None;
    }
}

/// Removes from an MPS daemon what `viewer` may not see.
pub(crate) fn mps(daemon: &mut MpsDaemon, viewer: Viewer) {
    daemon.servers.iter_mut().for_each(|server| mps_server(server, viewer));
    daemon.clients.iter_mut().for_each(|client| mps_client(client, viewer));
}

fn mps_server(server: &mut MpsServer, viewer: Viewer) {
    if !viewer.may_see(server.uid) {
        (server.pid, server.uid, server.user) = (None, None, None);
    }
}

fn mps_client(client: &mut MpsClient, viewer: Viewer) {
    if !viewer.may_see(client.uid) {
        let unidentified = client.unidentified;
        *client = MpsClient {
            pid: None,
            server: None,
            uid: None,
            user: None,
            command: None,
            lease: None,
            unattributed: false,
            unidentified,
        };
    }
}

/// Removes from the config what `viewer` may not see, except its text.
pub(crate) fn config(view: &mut ConfigView, viewer: Viewer) {
    if !viewer.is_admin() {
        view.pending_restart.clear();
        view.trouble.iter_mut().for_each(config_error);
    }
}

/// Removes the details of an error in the config file, because they contain lines of the file.
pub(crate) fn config_error(error: &mut ApiError) {
    *error = ApiError::new(error.code, "gpushd could not load the config file")
        .hint("an administrator sees the reason with `gpushctl config show`");
}

/// Removes from an event what `viewer` may not see.
pub(crate) fn event(what: &mut EventPayload, viewer: Viewer) {
    match what {
        EventPayload::Operation(change) => actor(&mut change.operation.by, viewer),
        EventPayload::Change(change) => change.by.iter_mut().for_each(|by| actor(by, viewer)),
        EventPayload::Config(change) if !viewer.is_admin() => {
            change.pending_restart.clear();
            change.error.iter_mut().for_each(config_error);
        }
        EventPayload::Unleased(change) if !viewer.may_see(change.uid) => {
            (change.pid, change.uid, change.user, change.command) = (None, None, None, None);
        }
        EventPayload::Xid(xid) if !viewer.may_see(xid.process.as_ref().and_then(|process| process.uid)) => {
            xid.process = None;
        }
        EventPayload::Notice(change) if !viewer.may_see(Some(change.holder.uid)) => change.notice.text.clear(),
        // Every user may read these events completely.
        EventPayload::Gpu(_)
        | EventPayload::Config(_)
        | EventPayload::Driver(_)
        | EventPayload::Xid(_)
        | EventPayload::Mps(_)
        | EventPayload::Lease(_)
        | EventPayload::Notice(_)
        | EventPayload::Unleased(_)
        | EventPayload::Resync(_) => {}
    }
}

fn hide(process: &mut Process, viewer: Viewer) {
    if viewer.may_see(process.uid) {
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
    use gpush_api::{
        Code, ConfigChange, GpuIndex, MpsServerState, ProcessKind, UnleasedChange, UnleasedStep, Xid, XidProcess,
    };

    use super::*;

    fn process() -> Process {
        Process {
            pid: Some(4711),
            uid: Some(1000),
            user: Some("alice".to_owned()),
            command: Some("python secret.py".to_owned()),
            kind: ProcessKind::Compute,
            memory_mib: Some(10),
            unidentified: false,
        }
    }

    #[test]
    fn process_is_hidden_from_other_users() {
        for viewer in [Viewer::User(1000), Viewer::Admin, Viewer::Log] {
            let mut seen = process();
            hide(&mut seen, viewer);
            assert_eq!(seen, process());
        }
        let mut seen = process();
        hide(&mut seen, Viewer::User(1001));
        assert_eq!(seen, Process { pid: None, uid: None, user: None, command: None, ..process() });
        // If the owner of a process is unknown, no user may see its details.
        let mut seen = Process { uid: None, ..process() };
        hide(&mut seen, Viewer::User(1001));
        assert_eq!(seen.pid, None);
    }

    #[test]
    fn mps_server_and_client_are_hidden_from_other_users() {
        let server = || MpsServer {
            pid: Some(4107),
            uid: Some(1000),
            user: Some("alice".to_owned()),
            state: Some(MpsServerState::Active),
        };
        let client = || MpsClient {
            pid: Some(4711),
            server: Some(4107),
            uid: Some(1000),
            user: Some("alice".to_owned()),
            command: Some("python secret.py".to_owned()),
            lease: Some("L1".to_owned()),
            unattributed: false,
            unidentified: false,
        };
        let seen = |viewer| {
            let (mut server, mut client) = (server(), client());
            mps_server(&mut server, viewer);
            mps_client(&mut client, viewer);
            (server, client)
        };
        for viewer in [Viewer::User(1000), Viewer::Admin, Viewer::Log] {
            assert_eq!(seen(viewer), (server(), client()), "{viewer:?}");
        }
        for viewer in [Viewer::User(1001), Viewer::Agent] {
            let text = format!("{:?}", seen(viewer));
            let hidden = ["4107", "4711", "secret"].into_iter().find(|hidden| text.contains(hidden));
            assert_eq!(hidden, None, "{viewer:?}: {text}");
            let (server, _) = seen(viewer);
            assert_eq!((server.uid, server.state), (None, Some(MpsServerState::Active)));
        }
    }

    #[test]
    fn unleased_process_is_named_to_its_owner_and_admins() {
        let unleased = || {
            EventPayload::Unleased(Box::new(UnleasedChange {
                gpu: GpuIndex(0),
                gpu_uuid: "GPU-0".into(),
                device: None,
                pid: Some(4711),
                uid: Some(1000),
                user: Some("alice".to_owned()),
                command: Some("train".to_owned()),
                why: "its user holds no lease".to_owned(),
                step: UnleasedStep::Asked,
            }))
        };
        for (viewer, sees) in [(Viewer::Admin, true), (Viewer::User(1000), true), (Viewer::User(1001), false)] {
            let mut what = unleased();
            event(&mut what, viewer);
            let EventPayload::Unleased(seen) = &what else { panic!("another kind") };
            assert_eq!(what == unleased(), sees);
            assert_eq!(seen.pid.is_some() && seen.command.is_some(), sees);
        }
    }

    #[test]
    fn process_of_an_xid_is_named_to_its_user_and_admins() {
        let process = |uid| XidProcess { pid: 4711, command: Some("train".to_owned()), uid, lease_id: None };
        let xid =
            |uid| Xid { gpu: None, gpu_uuid: "GPU-0".into(), xid: 31, gi: None, ci: None, process: Some(process(uid)) };
        let owned = Some(1000);
        for (viewer, uid, sees) in [
            (Viewer::Admin, None, true),
            (Viewer::User(1000), owned, true),
            (Viewer::User(1000), None, false),
            (Viewer::User(1001), owned, false),
        ] {
            let mut what = EventPayload::Xid(xid(uid));
            event(&mut what, viewer);
            assert_eq!(what == EventPayload::Xid(xid(uid)), sees, "{viewer:?} {uid:?}");
        }
    }

    /// Fault: the error of a reload showed lines of the config file to every user.
    #[test]
    fn error_in_config_file_is_hidden_from_users() {
        let failed = || {
            let error = ApiError::new(Code::ConfigInvalid, "3 errors").cause("line 4: users = [\"bob\"]");
            let pending_restart = vec!["driver.library".to_owned()];
            EventPayload::Config(ConfigChange { taken: false, error: Some(error), pending_restart })
        };
        for (viewer, sees) in [(Viewer::Admin, true), (Viewer::User(1000), false)] {
            let mut what = failed();
            event(&mut what, viewer);
            assert_eq!(what == failed(), sees);
            assert_eq!(format!("{what:?}").contains("bob"), sees);
        }
    }

    /// Fault: the name of a session or of a user's unit named the user to other users.
    #[test]
    fn hidden_holder_keeps_its_unit_only_if_it_is_a_service() {
        let with_unit = |unit: &str| Holder {
            pid: Some(4711),
            uid: Some(1000),
            user: Some("alice".to_owned()),
            command: Some("python secret.py".to_owned()),
            unit: Some(unit.to_owned()),
            devices: vec!["/dev/nvidia0".to_owned()],
            ..Holder::default()
        };
        let service = "nvidia-dcgm.service";
        for (unit, kept) in [(service, Some(service)), ("session-3.scope", None), ("user@1000.service", None)] {
            let hidden =
                Holder { unit: kept.map(str::to_owned), devices: with_unit(unit).devices, ..Holder::default() };
            assert_eq!(blank_holder(with_unit(unit)), hidden, "{unit}");
            assert_eq!(holder(with_unit(unit), Viewer::User(1001)), hidden, "{unit}");
            assert_eq!(holder(with_unit(unit), Viewer::User(1000)), with_unit(unit), "{unit}");
        }
    }
}
