use proptest::prelude::*;

use super::*;

/// Returns the kind of a cgroup on a host where root owns every directory, except those below a
/// delegated unit of user 1000.
fn place(cgroups: &str) -> CgroupKind {
    CgroupKind::parse_with(cgroups, |_, path| {
        let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
        let is_users = parent.contains("user@1000.service") || parent.contains("delegated.service");
        Some(if is_users { 1000 } else { 0 })
    })
}

fn session() -> CgroupKind {
    let cgroup = "/user.slice/user-1000.slice/session-4.scope".to_owned();
    CgroupKind::Session { cgroup, uid: 1000, is_below: false }
}

fn unit(cgroup: &str) -> CgroupKind {
    CgroupKind::Unit { cgroup: cgroup.to_owned() }
}

fn container(cgroup: &str) -> CgroupKind {
    CgroupKind::Container { cgroup: cgroup.to_owned() }
}

const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// The shell of an SSH login in the unified, hybrid (both trees) and legacy hierarchies.
#[test]
fn login_session_is_found_in_each_hierarchy() {
    let hybrid = "13:devices:/user.slice\n8:memory:/user.slice/user-1000.slice/session-4.scope\n\
                  1:name=systemd:/user.slice/user-1000.slice/session-4.scope\n\
                  0::/user.slice/user-1000.slice/session-4.scope\n";
    let legacy = "11:devices:/user.slice\n1:name=systemd:/user.slice/user-1000.slice/session-4.scope\n";
    for text in ["0::/user.slice/user-1000.slice/session-4.scope\n", hybrid, legacy] {
        assert_eq!(place(text), session(), "{text}");
    }
}

/// Fault: root had moved a process of a session into a cgroup with limits, and `run` took the process out of it.
#[test]
fn process_in_a_cgroup_below_its_session_gets_no_new_scope() {
    let session = "/user.slice/user-1000.slice/session-4.scope";
    let legacy = format!("4:memory:{session}/limited\n1:name=systemd:{session}\n");
    for text in [format!("0::{session}/limited\n"), legacy] {
        let below = || place(&text);
        assert_eq!(below(), CgroupKind::Session { cgroup: session.to_owned(), uid: 1000, is_below: true }, "{text}");
        let choose = |wish| below().choose(wish, 1000, true, UnitOwner::Others);
        assert!(matches!(choose(BindRequest::NewScope), BindTarget::None(_)));
        assert_eq!(choose(BindRequest::Present), BindTarget::Cgroup(session.to_owned()));
    }
}

#[test]
fn containers_are_found_by_the_names_of_their_runtimes() {
    let pod = "pod3f2a1b00_0000_4000_8000_000000000000";
    for (text, cgroup) in [
        (format!("0::/system.slice/docker-{ID}.scope\n"), format!("/system.slice/docker-{ID}.scope")),
        (format!("0::/docker/{ID}\n"), format!("/docker/{ID}")),
        // The hierarchy of the Docker daemon shows only the daemon's service; the other hierarchies
        // show the container.
        (
            format!("9:devices:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/containerd.service\n"),
            format!("/docker/{ID}"),
        ),
        (format!("0::/machine.slice/libpod-{ID}.scope/container\n"), format!("/machine.slice/libpod-{ID}.scope")),
        (
            format!("0::/kubepods.slice/kubepods-besteffort.slice/kubepods-{pod}.slice/cri-containerd-{ID}.scope\n"),
            format!("/kubepods.slice/kubepods-besteffort.slice/kubepods-{pod}.slice/cri-containerd-{ID}.scope"),
        ),
        (format!("5:memory:/kubepods/burstable/{pod}/{ID}\n"), format!("/kubepods/burstable/{pod}/{ID}")),
        ("0::/lxc.payload.web/init.scope\n".to_owned(), "/lxc.payload.web".to_owned()),
        (
            "0::/machine.slice/machine-ci.scope/payload/init.scope\n".to_owned(),
            "/machine.slice/machine-ci.scope".to_owned(),
        ),
    ] {
        assert_eq!(place(&text), container(&cgroup), "{text}");
    }
}

#[test]
fn units_jobs_and_lease_scopes_are_distinguished() {
    for (text, expected) in [
        ("0::/system.slice/jupyter.service\n", unit("/system.slice/jupyter.service")),
        ("0::/system.slice/cron.service\n", unit("/system.slice/cron.service")),
        ("0::/system.slice/delegated.service/worker.scope\n", unit("/system.slice/delegated.service")),
        ("0::/system.slice/run-r0a1b.scope\n", unit("/system.slice/run-r0a1b.scope")),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/a.service\n",
            CgroupKind::UserManager { uid: 1000 },
        ),
        (
            "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n",
            CgroupKind::SlurmJob { cgroup: "/system.slice/slurmstepd.scope/job_42".to_owned(), job: 42 },
        ),
        (
            "5:devices:/slurm/uid_1000/job_7/step_0\n0::/system.slice/slurmd.service\n",
            CgroupKind::SlurmJob { cgroup: "/slurm/uid_1000/job_7".to_owned(), job: 7 },
        ),
        (
            "0::/gpulease.slice/gpulease-1000.slice/gpulease-0a1b2c3d-17.scope\n",
            CgroupKind::Lease { cgroup: "/gpulease.slice/gpulease-1000.slice/gpulease-0a1b2c3d-17.scope".to_owned() },
        ),
        ("0::/init.scope\n", CgroupKind::Other),
        ("0::/\n", CgroupKind::Other),
        ("0::/../../x.service\n", CgroupKind::Other),
        ("", CgroupKind::Other),
    ] {
        assert_eq!(place(text), expected, "{text}");
    }
}

/// A user can create cgroups with all of these names where systemd delegated a cgroup to that user.
#[test]
fn forged_names_below_a_delegated_cgroup_are_ignored() {
    for forged in [
        "gpulease.slice/gpulease-1000.slice/gpulease-0a1b2c3d-17.scope",
        "gpulease-0a1b2c3d-17.scope",
        "slurmstepd.scope/job_1",
        "system.slice/slurmstepd.scope/job_1/step_0",
        "user.slice/user-0.slice/session-1.scope",
        "system.slice/root.service",
        &format!("docker-{ID}.scope"),
        &format!("docker/{ID}"),
    ] {
        let text = format!("0::/user.slice/user-1000.slice/user@1000.service/{forged}\n");
        assert_eq!(place(&text), CgroupKind::UserManager { uid: 1000 }, "{forged}");
        let text = format!("0::/system.slice/delegated.service/{forged}\n");
        assert_eq!(place(&text), unit("/system.slice/delegated.service"), "{forged}");
    }
}

/// Root created none of these cgroups: a user created cgroups with these names in a top-level
/// directory that belongs to the user.
#[test]
fn cgroup_not_created_by_root_is_ignored() {
    for text in [
        "0::/gpulease.slice/gpulease-1000.slice/gpulease-0a1b2c3d-17.scope\n",
        "0::/user.slice/user-1000.slice/session-4.scope\n",
        "0::/system.slice/slurmstepd.scope/job_1\n",
        "0::/system.slice/docker-0.scope\n",
    ] {
        for owner in [Some(1000), None] {
            assert_eq!(CgroupKind::parse_with(text, |_, _| owner), CgroupKind::Other, "{text}");
        }
    }
}

#[test]
fn lease_is_bound_as_the_caller_is_placed() {
    let scope = |path: &str| BindTarget::Cgroup(path.to_owned());
    let service = || unit("/system.slice/a.service");
    let manager = || CgroupKind::UserManager { uid: 1000 };
    let none = |choice: BindTarget| matches!(choice, BindTarget::None(_));
    let choose = |place: CgroupKind, wish| place.choose(wish, 1000, true, UnitOwner::Caller);
    assert_eq!(choose(session(), BindRequest::NewScope), BindTarget::NewScope);
    assert_eq!(choose(session(), BindRequest::Present), scope("/user.slice/user-1000.slice/session-4.scope"));
    assert!(none(session().choose(BindRequest::Present, 1001, true, UnitOwner::Caller)), "another user's session");
    for wish in [BindRequest::NewScope, BindRequest::Present] {
        assert_eq!(choose(service(), wish), scope("/system.slice/a.service"));
        assert_eq!(choose(container("/docker/x"), wish), scope("/docker/x"));
        let job = CgroupKind::SlurmJob { cgroup: "/slurm/uid_1000/job_7".to_owned(), job: 7 };
        assert_eq!(choose(job, wish), scope("/slurm/uid_1000/job_7"));
        assert!(none(choose(CgroupKind::Other, wish)));
        assert!(
            none(choose(CgroupKind::Lease { cgroup: String::new() }, wish)),
            "it would leave the first lease's scope"
        );
    }
    // A service that starts sessions, such as cron or sshd, also has processes of root. So a lease
    // can be bound to a new scope, but not to the cgroup of the service.
    assert_eq!(service().choose(BindRequest::NewScope, 1000, true, UnitOwner::SessionService), BindTarget::NewScope);
    assert!(none(service().choose(BindRequest::Present, 1000, true, UnitOwner::SessionService)));
    // gpushd never moves a process out of another unit, because that unit's limits would then no
    // longer apply.
    for wish in [BindRequest::NewScope, BindRequest::Present] {
        assert!(none(service().choose(wish, 1000, true, UnitOwner::Others)));
    }
    assert_eq!(choose(manager(), BindRequest::NewScope), BindTarget::NewScope);
    assert!(none(choose(manager(), BindRequest::Present)));
    // A process in other namespaces is never moved.
    assert!(none(session().choose(BindRequest::NewScope, 1000, false, UnitOwner::Caller)));
    assert!(none(manager().choose(BindRequest::NewScope, 1000, false, UnitOwner::Caller)));
}

proptest! {
    /// A cgroup below a user's service manager belongs to that manager, whatever its name is.
    #[test]
    fn names_below_the_users_manager_never_count(names in proptest::collection::vec("[a-z0-9@._-]{1,24}", 0..6)) {
        let below: String = names.iter().map(|name| format!("/{name}")).collect();
        let text = format!("0::/user.slice/user-1000.slice/user@1000.service{below}\n");
        prop_assert_eq!(place(&text), CgroupKind::UserManager { uid: 1000 });
    }

    /// No text causes a panic. If root owns no directory, the lease cannot be bound to a cgroup.
    #[test]
    fn any_text_is_classified(text in "[0-9:a-z=./@\\n-]{0,200}", owner in proptest::option::of(1..u32::MAX)) {
        prop_assert_eq!(CgroupKind::parse_with(&text, |_, _| owner), CgroupKind::Other);
        let _any = CgroupKind::parse_with(&text, |_, _| Some(0));
    }

    /// A process of a container or of a job is never moved.
    #[test]
    fn processes_of_containers_and_jobs_are_never_moved(uid: u32, here: bool, job in 1..u64::MAX) {
        for place in [container("/docker/x"), CgroupKind::SlurmJob { cgroup: "/slurm/uid_1/job_1".to_owned(), job }] {
            prop_assert!(matches!(place.choose(BindRequest::NewScope, uid, here, UnitOwner::SessionService), BindTarget::Cgroup(_)));
        }
    }
}
