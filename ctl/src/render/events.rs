//! Events as lines: time, object, state, and text.

use anstyle::Style;
use gpush_api::{
    Actor, ConfigChange, DriverChange, Event, EventPayload, Gpu, GpuAspect, GpuChange, GpuState, InstanceSummary,
    LeaseChange, LeaseState, NoticeChange, OperationChange, OperationState, ResyncReason, UnleasedChange, XidProcess,
};
use gpush_client::ReceivedEvent;
use jiff::Timestamp;

use super::{
    Appearance,
    appearance::{BAD, NOTE, PLAIN, QUIET, broken, pad, paint, width},
    audit::object,
    listing::Listing,
    mps, names,
    names::gpu_numbers,
    operation,
    table::{BELOW, PROSE},
    timeslice,
};

/// Widths of the columns with the object and the state.
const COLUMNS: (usize, usize) = (8, 11);

/// Width of the column with the kind, which only `-o wide` shows.
const KIND: usize = 9;

/// Returns the time of an event. `None` if gpushctl does not know this kind of event.
pub(crate) fn time(reported: &ReceivedEvent) -> Option<Timestamp> {
    match reported {
        ReceivedEvent::Known(event) => Some(event.at),
        ReceivedEvent::Unknown(_) => None,
    }
}

/// Returns whether an event is about a step of an operation, not about its begin, its end or a note.
pub(crate) fn is_step(reported: &ReceivedEvent) -> bool {
    let ReceivedEvent::Known(event) = reported else { return false };
    match &event.what {
        EventPayload::Operation(change) => {
            let is_going = matches!(change.operation.state, OperationState::Running | OperationState::Cancelling);
            change.note.is_none() && is_going && change.progress.iter().any(|gpu| gpu.done > 0 || gpu.doing.is_some())
        }
        // If an operation is changing the GPU, the event shows only intermediate instances, so treat the event as a
        // step.
        EventPayload::Gpu(change) => {
            let between = |aspect: &GpuAspect| matches!(aspect, GpuAspect::Instances | GpuAspect::Drift);
            let is_step = change.state == GpuState::Changing && change.changed.iter().all(between);
            is_step && change.destroyed_device_uuids.is_empty()
        }
        EventPayload::Config(_)
        | EventPayload::Driver(_)
        | EventPayload::Xid(_)
        | EventPayload::Mps(_)
        | EventPayload::Lease(_)
        | EventPayload::Notice(_)
        | EventPayload::Unleased(_)
        | EventPayload::Change(_)
        | EventPayload::Resync(_) => false,
    }
}

/// Lists the events of `gpushctl events`.
pub(crate) fn list(all: &[ReceivedEvent], gpus: &[Gpu], look: &Appearance) -> Listing {
    let rows = all.iter().map(|reported| match reported {
        ReceivedEvent::Known(event) => {
            let (about, (word, _), text) = columns(event, gpus, look);
            vec![
                utc(event.at),
                event.what.kind().name().to_owned(),
                look.clean(&about),
                word.to_owned(),
                look.clean(&text),
            ]
        }
        ReceivedEvent::Unknown(value) => {
            vec![String::new(), String::new(), String::new(), String::new(), value.to_string()]
        }
    });
    let ids = all.iter().map(|reported| match reported {
        ReceivedEvent::Known(event) => event.id.clone(),
        ReceivedEvent::Unknown(_) => String::new(),
    });
    Listing::of(vec!["TIME", "KIND", "OBJECT", "STATE", "TEXT"], rows.collect())
        .names(ids)
        .drawn(all.iter().map(|reported| line(reported, gpus, look)).collect())
}

/// Formats a time for programs: UTC, in whole seconds.
fn utc(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Draws one event, with a line break at the end.
pub(crate) fn line(reported: &ReceivedEvent, gpus: &[Gpu], look: &Appearance) -> String {
    match reported {
        ReceivedEvent::Known(event) => known(event, gpus, look),
        // gpushctl does not know this kind of event, so print what gpushd sent.
        ReceivedEvent::Unknown(value) => format!("{}\n", look.clean(&value.to_string())),
    }
}

/// Names the process that caused an Xid error, and its lease: `: process 4711 (python) of L17`.
fn caused_by(process: &XidProcess, look: &Appearance) -> String {
    let command = process.command.as_ref().map_or_else(String::new, |name| format!(" ({})", look.clean(name)));
    let lease = process.lease_id.map_or_else(String::new, |id| format!(" of {id}"));
    format!(": process {}{command}{lease}", process.pid)
}

/// Returns the columns of an event: its object, its state with a style, and its text.
fn columns(event: &Event, gpus: &[Gpu], look: &Appearance) -> (String, (&'static str, Style), String) {
    match &event.what {
        EventPayload::Operation(change) => {
            (change.operation.id.clone(), operation::state(change.operation.state), of_operation(change))
        }
        EventPayload::Gpu(change) => (format!("GPU {}", change.gpu), names::state(change.state), of_gpu(change)),
        EventPayload::Config(change) => of_config(change),
        EventPayload::Driver(change) => of_driver(change),
        EventPayload::Xid(xid) => {
            let about = xid.gpu.map_or_else(|| "GPU ?".to_owned(), |gpu| format!("GPU {gpu}"));
            let instance = match (xid.gi, xid.ci) {
                (None, _) => String::new(),
                (Some(gi), None) => format!(" in GI {gi}"),
                (Some(gi), Some(ci)) => format!(" in GI {gi} CI {ci}"),
            };
            let by = xid.process.as_ref().map_or_else(String::new, |process| caused_by(process, look));
            (about, ("xid", BAD), format!("Xid {}{instance}{by}", xid.xid))
        }
        EventPayload::Mps(change) => {
            let about =
                change.gpu.map_or_else(|| object(change.gpu_uuid.as_str(), gpus, look), |gpu| format!("GPU {gpu}"));
            let of = if change.uuid == change.gpu_uuid { String::new() } else { format!(" of {}", change.uuid) };
            let why = change.reasons.iter().map(|reason| format!("; {reason}")).collect::<String>();
            (about, mps::state(change.state), format!("MPS daemon{of}{why}"))
        }
        EventPayload::Lease(change) => (change.lease_id.to_string(), lease_state(change), of_lease(change)),
        EventPayload::Notice(change) => (change.lease_id.to_string(), ("notice", NOTE), of_notice(change)),
        EventPayload::Unleased(change) => (format!("GPU {}", change.gpu), ("unleased", NOTE), of_unleased(change)),
        EventPayload::Change(change) => {
            let reason = change.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
            let by = change.by.as_ref().map_or_else(|| "gpushd".to_owned(), name);
            (object(&change.object, gpus, look), ("change", NOTE), format!("{} by {by}{reason}", change.action))
        }
        EventPayload::Resync(resync) => {
            let text = match resync.reason {
                ResyncReason::OtherRun => "gpushd restarted; earlier events are not known",
                ResyncReason::Missed => "some events are missing, because gpushd keeps only the latest ones",
            };
            ("resync".to_owned(), ("resync", NOTE), text.to_owned())
        }
    }
}

fn known(event: &Event, gpus: &[Gpu], look: &Appearance) -> String {
    let (about, (word, style), text) = columns(event, gpus, look);
    let about = look.clean(&about);
    let clock = if look.wide {
        format!("{}  {}  {}", utc(event.at), look.clean(&event.id), pad(event.what.kind().name(), KIND))
    } else {
        look.clock(event.at)
    };
    let (about, word) = (pad(&about, COLUMNS.0), pad(word, COLUMNS.1));
    let line = |word: &str| format!("{}  {about}  {}", paint(QUIET, &clock), paint(style, word));
    let before = width(&clock) + 2 + width(&about) + 2 + width(&word) + 2;
    let text = look.clean(&text);
    let room = look.width.saturating_sub(before);
    if !look.wraps || width(&text) <= room {
        return format!("{}\n", format!("{}  {text}", line(&word)).trim_end());
    }
    // Print the text next to the other columns if there is enough room. Otherwise print it below them.
    let (hang, mut out) =
        if room >= PROSE { (before, format!("{}  ", line(&word))) } else { (BELOW, line(word.trim_end()) + "\n") };
    for (at, more) in broken(&text, look.width.saturating_sub(hang)).into_iter().enumerate() {
        let indent = if at == 0 && hang == before { 0 } else { hang };
        out += &format!("{}{more}\n", " ".repeat(indent));
    }
    out
}

fn name(actor: &Actor) -> String {
    actor.user.clone().unwrap_or_else(|| format!("uid {}", actor.uid))
}

/// Describes an operation: by its note; else by its current steps; else by its kind, user and GPUs.
fn of_operation(change: &OperationChange) -> String {
    if let Some(note) = &change.note {
        return note.clone();
    }
    let one = &change.operation;
    let doing: Vec<String> = change
        .progress
        .iter()
        .filter_map(|gpu| Some(format!("GPU {}  {}/{} {}", gpu.gpu, gpu.done, gpu.total, gpu.doing.as_ref()?)))
        .collect();
    if !doing.is_empty() {
        return doing.join("; ");
    }
    let whose = format!("{} by {} on {}", one.kind, name(&one.by), gpu_numbers(&one.gpus));
    match &one.error {
        Some(error) => format!("{whose}: {}", error.message),
        None => whose,
    }
}

/// Describes a notice. Only its holder and administrators see the text.
fn of_notice(change: &NoticeChange) -> String {
    let holder = change.holder.user.clone().unwrap_or_else(|| format!("uid {}", change.holder.uid));
    let text = &change.notice.text;
    if text.is_empty() {
        format!("notice to {holder}: {}", change.notice.kind.name())
    } else {
        format!("notice to {holder}: {text}")
    }
}

fn lease_state(change: &LeaseChange) -> (&'static str, Style) {
    (change.state.name(), if change.state == LeaseState::Active { PLAIN } else { NOTE })
}

/// Describes a lease: its kind, its holder, and why it ended.
fn of_lease(change: &LeaseChange) -> String {
    let holder = change.holder.user.clone().unwrap_or_else(|| format!("uid {}", change.holder.uid));
    let reason = change.reason.map_or_else(String::new, |reason| format!(": {}", reason.name().replace('_', " ")));
    format!("lease of kind {} for {holder}{reason}", change.share)
}

/// Describes an unleased process: `alice 4711 python train.py was asked to end: it computes without MPS`.
fn of_unleased(change: &UnleasedChange) -> String {
    let user = change.user.clone().or_else(|| change.uid.map(|uid| format!("uid {uid}")));
    let words = [user, change.pid.map(|pid| pid.to_string()), change.command.clone()];
    let who = words.into_iter().flatten().collect::<Vec<_>>().join(" ");
    let who = if who.is_empty() { "a process of another user".to_owned() } else { who };
    let device = change.device.as_ref().map_or_else(String::new, |device| format!(" on {device}"));
    format!("{who}{device} was {}: {}", change.step.log_text(), change.why)
}

fn of_gpu(change: &GpuChange) -> String {
    let mut parts = Vec::new();
    for aspect in &change.changed {
        match aspect {
            GpuAspect::Appeared => parts.push(format!("seen{}", standing(change))),
            GpuAspect::State => parts.extend(change.reasons.iter().cloned()),
            GpuAspect::Drift if change.drift.is_empty() => parts.push("no drift any more".to_owned()),
            GpuAspect::Drift => parts.push(format!("drift: {}", change.drift.join(", "))),
            GpuAspect::Pending if change.pending.is_empty() => parts.push("no change is pending any more".to_owned()),
            GpuAspect::Pending => parts.extend(change.pending.iter().map(|one| one.describe(change.gpu))),
            GpuAspect::Mig => parts.push(match change.mig {
                Some(true) => "MIG mode is on".to_owned(),
                Some(false) => "MIG mode is off".to_owned(),
                None => "no MIG".to_owned(),
            }),
            GpuAspect::Instances => {
                parts.push(format!("has {}", instances(&change.instances)));
                if !change.destroyed_device_uuids.is_empty() {
                    parts.push(format!("destroyed: {}", change.destroyed_device_uuids.join(", ")));
                }
            }
            GpuAspect::ComputeMode => parts.push(match change.compute_mode {
                Some(mode) => format!("compute mode is {mode}"),
                None => "compute mode is not known".to_owned(),
            }),
            GpuAspect::Timeslice => parts.push(match &change.timeslice {
                Some(turns) => timeslice::level(turns),
                None => "no longer time-sliced".to_owned(),
            }),
        }
    }
    parts.join("; ")
}

fn standing(change: &GpuChange) -> String {
    if change.mig == Some(true) { format!(", has {}", instances(&change.instances)) } else { String::new() }
}

fn instances(all: &[InstanceSummary]) -> String {
    if all.is_empty() {
        return "no instance".to_owned();
    }
    let each = all.iter().map(|one| format!("{}@{}", one.profile, one.placement.start));
    each.collect::<Vec<_>>().join(", ")
}

fn of_config(change: &ConfigChange) -> (String, (&'static str, Style), String) {
    let word = if change.taken { ("reloaded", PLAIN) } else { ("refused", BAD) };
    let text = match &change.error {
        Some(error) => error.message.clone(),
        None if change.pending_restart.is_empty() => String::new(),
        None => format!("settings that take effect after a restart of gpushd: {}", change.pending_restart.join(", ")),
    };
    ("config".to_owned(), word, text)
}

fn of_driver(change: &DriverChange) -> (String, (&'static str, Style), String) {
    let (word, text) = match (&change.driver, &change.before, &change.error) {
        (Some(driver), Some(before), _) if *before != driver.version => {
            (("replaced", NOTE), format!("{before} by {}", driver.version))
        }
        (Some(driver), _, _) => (("serves", PLAIN), driver.version.clone()),
        (None, _, error) => (("gone", BAD), error.as_ref().map_or_else(String::new, |error| error.message.clone())),
    };
    ("driver".to_owned(), word, text)
}

#[cfg(test)]
mod tests {
    use gpush_api::{
        ApiError, Change, Code, Driver, GpuIndex, LeaseId, MpsChange, MpsState, OperationSummary, Placement, Resync,
        StepState, UnleasedStep, Xid,
    };

    use super::*;
    use crate::render::{Charset, fixtures};

    fn operation(state: OperationState, doing: Option<&str>, note: Option<&str>, error: Option<&str>) -> EventPayload {
        let step = StepState {
            gpu: GpuIndex(0),
            done: 2,
            total: 6,
            doing: doing.map(str::to_owned),
            rolling_back: false,
            restored: false,
            error: None,
        };
        let mut one = fixtures::operation(state);
        one.error = error.map(|text| ApiError::new(Code::Cancelled, text));
        EventPayload::Operation(Box::new(OperationChange {
            operation: OperationSummary::from(&one),
            progress: vec![step],
            note: note.map(str::to_owned),
        }))
    }

    #[test]
    fn each_kind_has_its_line() {
        let look = Appearance { wraps: false, ..fixtures::look(80, Charset::Ascii) };
        let gpu = |changed: &[GpuAspect], state, instances| {
            EventPayload::Gpu(Box::new(GpuChange {
                gpu: GpuIndex(3),
                gpu_uuid: "GPU-3".into(),
                changed: changed.to_vec(),
                state,
                reasons: vec!["operation op-1 is changing it".into()],
                drift: vec!["missing 1g.10gb".into()],
                pending: Vec::new(),
                mig: Some(true),
                instances,
                destroyed_device_uuids: vec!["MIG-1".into()],
                compute_mode: None,
                timeslice: None,
            }))
        };
        let instance = InstanceSummary {
            id: 2,
            profile: "3g.40gb".into(),
            placement: Placement { start: 4, size: 4 },
            compute: vec![0],
            device_uuids: vec!["MIG-2".into()],
        };
        let driver = |version: &str| Driver {
            version: version.into(),
            nvml: String::new(),
            cuda: String::new(),
            library: String::new(),
            simulated: true,
            memory_limits: false,
        };
        let error = |text: &str| ApiError::new(Code::DriverUnavailable, text);
        let unleased = UnleasedChange {
            gpu: GpuIndex(4),
            gpu_uuid: "GPU-4".into(),
            device: None,
            pid: Some(7001),
            uid: Some(1000),
            user: Some("mallory".into()),
            command: Some("./miner --all".into()),
            why: "its user has no lease".into(),
            step: UnleasedStep::Asked,
        };
        let device = Some("2g.20gb@2".into());
        let hidden = UnleasedChange {
            device,
            pid: None,
            uid: None,
            user: None,
            command: None,
            step: UnleasedStep::Killed,
            ..unleased.clone()
        };
        let all = [
            operation(OperationState::Queued, None, Some("waits: GPU 0 is in use"), None),
            operation(OperationState::Running, Some("creating GPU instance 1g.10gb@4"), None, None),
            operation(OperationState::Done, None, None, None),
            operation(OperationState::RolledBack, None, None, Some("operation op-1 was cancelled")),
            gpu(&[GpuAspect::Appeared], GpuState::Ready, vec![instance.clone()]),
            gpu(&[GpuAspect::State, GpuAspect::Drift], GpuState::Changing, Vec::new()),
            gpu(&[GpuAspect::Mig, GpuAspect::Instances], GpuState::Ready, vec![instance.clone(), instance]),
            EventPayload::Config(ConfigChange {
                taken: true,
                error: None,
                pending_restart: vec!["driver.library".into()],
            }),
            EventPayload::Config(ConfigChange {
                taken: false,
                error: Some(error("the config x has errors")),
                pending_restart: Vec::new(),
            }),
            EventPayload::Driver(DriverChange { driver: Some(driver("550.1")), before: None, error: None }),
            EventPayload::Driver(DriverChange {
                driver: Some(driver("560.1")),
                before: Some("550.1".into()),
                error: None,
            }),
            EventPayload::Driver(DriverChange {
                driver: None,
                before: Some("560.1".into()),
                error: Some(error("the driver is not loaded")),
            }),
            EventPayload::Xid(Xid {
                gpu: Some(GpuIndex(3)),
                gpu_uuid: "GPU-3".into(),
                xid: 79,
                gi: Some(2),
                ci: None,
                process: None,
            }),
            EventPayload::Xid(Xid {
                gpu: Some(GpuIndex(3)),
                gpu_uuid: "GPU-3".into(),
                xid: 31,
                gi: None,
                ci: None,
                process: Some(XidProcess {
                    pid: 4711,
                    command: Some("python\u{1b}".into()),
                    uid: Some(1000),
                    lease_id: Some(LeaseId(17)),
                }),
            }),
            EventPayload::Mps(Box::new(MpsChange {
                target: "g5d1b03a2".into(),
                uuid: "GPU-5d1b03a2".into(),
                gpu_uuid: "GPU-5d1b03a2".into(),
                gpu: Some(GpuIndex(0)),
                state: MpsState::BackingOff,
                reasons: vec!["the daemon was ended by signal 9".into(), "gpushd restarts it".into()],
            })),
            EventPayload::Unleased(Box::new(unleased.clone())),
            EventPayload::Unleased(Box::new(hidden)),
            EventPayload::Change(Change {
                action: "operation.cancel".into(),
                object: "op-17".into(),
                by: Some(Actor { uid: 0, user: Some("root".into()), pid: None }),
                reason: Some("not \u{1b}now".into()),
                gpu_uuids: Vec::new(),
            }),
            EventPayload::Resync(Resync { reason: ResyncReason::OtherRun }),
            EventPayload::Resync(Resync { reason: ResyncReason::Missed }),
        ];
        let at = look.now;
        let lines = all.into_iter().map(|what| {
            let reported = ReceivedEvent::Known(Box::new(Event { id: "e-1".into(), at, what }));
            fixtures::plain(&line(&reported, &[], &look)).replace(&look.clock(at), "TIME")
        });
        insta::assert_snapshot!(lines.collect::<String>());
        let young = ReceivedEvent::Unknown(serde_json::json!({"kind": "weather"}));
        assert_eq!(line(&young, &[], &look), "{\"kind\":\"weather\"}\n");
    }

    #[test]
    fn mps_event_names_its_gpu_even_if_the_index_was_not_known() {
        let look = fixtures::look(120, Charset::Ascii);
        let gpus = fixtures::mixed();
        let change = MpsChange {
            target: "m5d1b03a2".into(),
            uuid: "MIG-5d1b03a2".into(),
            gpu_uuid: gpus[1].uuid.clone(),
            gpu: None,
            state: MpsState::Ready,
            reasons: Vec::new(),
        };
        let what = EventPayload::Mps(Box::new(change));
        let event = Event { id: "x-1".to_owned(), at: look.now, what };
        assert_eq!(columns(&event, &gpus, &look).0, format!("GPU {}", gpus[1].index));
    }
}
