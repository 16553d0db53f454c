//! Records to write, and a dump of the store, for all tests of the store.

#![allow(dead_code, reason = "each test program uses its part of it")]

pub(crate) mod writer;

use std::{fmt::Write as _, path::Path};

use gpush_api::{
    Actor, GpuIndex, GpuInstance, GpuPlan, LeaseBinding, LeaseHolder, LeaseKind, LeaseMember, LeaseRequest,
    MemberShare, Mig, Placement, Priority,
};
use gpush_store::{
    AuditQuery, GpuIntent, Intent, LeaseHistory, LeaseTerms, NewAudit, NewCondition, NewLease, NewOperation,
    NewOverride, Note, Opened, Options, Store, StoreError, View,
};

pub(crate) fn actor(uid: u32) -> Actor {
    Actor { uid, user: Some(format!("user{uid}")), pid: Some(4000 + uid) }
}

/// Returns a lease of a user: a quarter of an MPS target, in two members so that the row contains a list.
pub(crate) fn new_lease(uid: u32) -> NewLease {
    NewLease {
        holder: LeaseHolder { uid, user: Some(format!("user{uid}")) },
        asked_by: actor(uid),
        kind: LeaseKind::Mps,
        request: LeaseRequest { gpus: vec!["0-3".to_owned()], duration_s: Some(7200), ..LeaseRequest::default() },
        binding: LeaseBinding::Process { pid: Some(4711), start: Some(815) },
    }
}

pub(crate) fn lease_terms(targets: &[&str]) -> LeaseTerms {
    let member = |target: &&str| LeaseMember {
        target: (*target).into(),
        gpu_uuid: "GPU-0".into(),
        share: MemberShare::Mps {
            percentage: "12.5".parse().unwrap(),
            memory_limit_mib: "8G".parse().ok(),
            priority: Priority::Normal,
        },
        memory_mib: 10_240,
        gpu_memory_mib: 81_920,
    };
    LeaseTerms { members: targets.iter().map(member).collect(), expires_at: None }
}

/// Returns a realistic intent: one GPU with seven previous instances.
pub(crate) fn intent(mark: u64) -> Intent {
    let instance = |id: u32| GpuInstance {
        id,
        profile_id: 19,
        profile: "1g.10gb".to_owned(),
        placement: Placement { start: id as u8, size: 1 },
        memory: None,
        compute: Vec::new(),
        processes: Vec::new(),
    };
    let before = Mig {
        enabled: true,
        reset_pending: false,
        memory_slices: 8,
        compute_slices: 7,
        instances: (0..7).map(instance).collect(),
        profiles: std::sync::Arc::default(),
    };
    let plan = GpuPlan {
        gpu: GpuIndex(0),
        gpu_uuid: "GPU-0".into(),
        name: "NVIDIA H100".to_owned(),
        layout: vec!["3g.40gb".to_owned(), "2g.20gb".to_owned()],
        keeps: vec![1, 2],
        ..GpuPlan::default()
    };
    Intent {
        gpus: vec![GpuIntent { before: Some(before), plan }],
        more: serde_json::json!({ "mark": mark }),
        ..Intent::default()
    }
}

pub(crate) fn operation(kind: &str, mark: u64) -> NewOperation {
    NewOperation { kind: kind.to_owned(), by: actor(1000), reason: None, intent: intent(mark), progress: Vec::new() }
}

pub(crate) fn audit(action: &str, object: &str) -> NewAudit {
    NewAudit {
        by: Some(actor(0)),
        action: action.to_owned(),
        object: object.to_owned(),
        result: "accepted".to_owned(),
        detail: serde_json::json!({ "layout": ["1g.10gb"] }),
    }
}

pub(crate) fn override_of(gpu: &str, reason: &str) -> NewOverride {
    NewOverride {
        gpu_uuid: gpu.into(),
        rule: Some("rule 1".to_owned()),
        layout: vec!["3g.40gb".to_owned(), "1g.10gb*2".to_owned()],
        author: actor(0),
        reason: reason.to_owned(),
        expires_at: None,
    }
}

pub(crate) fn condition(gpu: &str, cause: &str) -> NewCondition {
    NewCondition {
        scope: gpush_store::Scope::Gpu(gpu.into()),
        kind: gpush_store::ConditionKind::Cordon,
        cause: cause.to_owned(),
        reason: "fan replaced".to_owned(),
        by: Some(actor(0)),
    }
}

pub(crate) fn options() -> Options {
    Options { boot_id: "boot-1".to_owned(), ..Options::default() }
}

pub(crate) fn open(directory: &Path) -> Opened {
    Store::open(directory, options()).unwrap()
}

pub(crate) fn lost(notes: &[Note]) -> Option<&gpush_store::Lost> {
    notes.iter().find_map(|note| if let Note::Lost(lost) = note { Some(lost) } else { None })
}

/// Returns everything in the store as text.
pub(crate) fn everything(view: &View<'_>) -> Result<String, StoreError> {
    let mut text = String::new();
    for operation in view.operations()? {
        let (intent, undo) = (view.intent(operation.id)?, view.undo(operation.id)?);
        writeln!(text, "{operation:?} {intent:?} {undo:?}").unwrap();
    }
    for one in view.overrides()? {
        writeln!(text, "{one:?}").unwrap();
    }
    for one in view.conditions()? {
        writeln!(text, "{one:?}").unwrap();
    }
    for one in view.open_leases()? {
        writeln!(text, "{one:?}").unwrap();
    }
    for one in view.ended_leases(&LeaseHistory { uids: None, before: None, limit: usize::MAX })? {
        writeln!(text, "{one:?}").unwrap();
    }
    writeln!(text, "{}", view.last_lease()?).unwrap();
    for one in view.mps_targets()? {
        writeln!(text, "{one:?}").unwrap();
    }
    for one in view.shared_gpus()? {
        writeln!(text, "{one:?}").unwrap();
    }
    for one in view.audit(&AuditQuery::default())? {
        writeln!(text, "{one:?}").unwrap();
    }
    writeln!(text, "{:?} {:?}", view.answer(1000, "key", b"request")?, view.last_boot()?).unwrap();
    writeln!(text, "{:?} sequence {} generation {}", view.lost()?, view.sequence(), view.generation()).unwrap();
    Ok(text)
}
