//! Leased devices, which are in use even without a process.

use gpush_api::{LeaseHolder, LeaseId, LeaseKind, LeaseUse};

use super::*;

fn lease(id: u64, target: &str) -> LeaseUse {
    LeaseUse {
        id: LeaseId(id),
        target: target.into(),
        kind: LeaseKind::Mig,
        share: gpush_api::MemberShare::Mig { profile: "1g.10gb".to_owned() },
        holder: LeaseHolder { uid: 1000, user: Some("alice".to_owned()) },
        until: Some("2026-12-01T08:00:00Z".parse().unwrap()),
    }
}

#[test]
fn idle_leased_instance_blocks_a_layout() {
    let mut host = host();
    set(&mut host[0], &[("3g.40gb", 0, &[]), ("3g.40gb", 4, &[])]);
    host[0].mig.as_mut().unwrap().instances[1].compute[0].uuid = Some("MIG-1".into());
    host[0].leases = vec![lease(17, "MIG-1")];
    // The layout keeps the leased instance. The other instance is free, so the layout may destroy
    // it.
    assert!(one(&config(), &host, &request(&["0"], entries("3g.40gb@4,1g.10gb*2"))).error.is_none());
    let plan = one(&config(), &host, &request(&["0"], entries("7g.80gb")));
    assert!(plan.steps.is_empty());
    let Some(Refusal::Blocked { blockers }) = &plan.refusal else { panic!("{:?}", plan.refusal) };
    assert_eq!(blockers.len(), 1);
    assert_eq!((blockers[0].gi, &blockers[0].leases), (2, &vec![lease(17, "MIG-1")]));
    insta::assert_snapshot!(shown(plan.error.as_ref().unwrap()));
}

#[test]
fn leased_gpu_blocks_a_change_of_mig_mode() {
    let mut host = host();
    let mig = host[0].mig.as_mut().unwrap();
    (mig.enabled, mig.reset_pending) = (false, false);
    let uuid = host[0].uuid.clone();
    host[0].leases = vec![lease(21, uuid.as_str()), lease(17, uuid.as_str())];
    let plan = one(&config(), &host, &request(&["0"], LayoutSource::Config));
    assert!(plan.steps.is_empty());
    assert!(
        matches!(&plan.refusal, Some(Refusal::Held { holders, leases }) if holders.is_empty() && leases.len() == 2)
    );
    insta::assert_snapshot!(shown(plan.error.as_ref().unwrap()));
}

#[test]
fn leased_instance_blocks_disabling_mig_mode() {
    let mut host = host();
    set(&mut host[3], &[("1g.10gb", 0, &[])]);
    host[3].mig.as_mut().unwrap().instances[0].compute[0].uuid = Some("MIG-1".into());
    host[3].leases = vec![lease(17, "MIG-1")];
    let plan = one(&config(), &host, &request(&["3"], LayoutSource::Config));
    assert!(matches!(&plan.refusal, Some(Refusal::Blocked { .. })), "{:?}", plan.refusal);
}

#[test]
fn dynamic_layout_wants_mig_mode_and_no_instances() {
    let text = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";
    let config = Config::parse(text, "config.toml").unwrap();
    let mut host = host();
    set(&mut host[0], &[("3g.40gb", 4, &[])]);
    describe_all(&config, &mut host);
    assert_eq!((&host[0].drift, &host[0].layout), (&Vec::new(), &Some(vec!["dynamic".to_owned()])));
    for source in [LayoutSource::Config, LayoutSource::Wanted] {
        let plan = one(&config, &host, &request(&["0"], source));
        assert!(plan.error.is_none() && plan.steps.is_empty() && plan.keeps == [1], "{plan:?}");
    }
    // A request with an explicit layout sets an override, and a request for the rule's layout
    // clears the override.
    let applied = request(&["0"], entries("7g.80gb"));
    let plans = plan_host(&config, &host, &applied).unwrap().plans;
    assert!(
        matches!(&override_effects(&config, &host, &applied, &plans)[0], OverrideEffect::Made { layout, .. } if *layout == ["7g.80gb"])
    );
    let own = request(&["0"], LayoutSource::Config);
    let plans = plan_host(&config, &host, &own).unwrap().plans;
    assert_eq!(override_effects(&config, &host, &own, &plans), [OverrideEffect::Ended]);

    let mig = host[0].mig.as_mut().unwrap();
    (mig.enabled, mig.reset_pending) = (false, false);
    mig.instances.clear();
    describe_all(&config, &mut host);
    assert_eq!(host[0].drift, ["MIG mode is off"]);
    let plan = one(&config, &host, &request(&[], LayoutSource::Wanted));
    assert_eq!((plan.mig_mode(), plan.instance_steps().count()), (Some(true), 0));
}

fn shown(error: &ApiError) -> String {
    let causes: Vec<String> = error.causes.iter().map(|cause| format!("cause: {cause}")).collect();
    format!("{}\n{}\nhint: {}", error.message, causes.join("\n"), error.hint.as_deref().unwrap_or_default())
}
