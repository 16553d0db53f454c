//! All ordered pairs of a leased kind and another rule, and all ways in which the rule can change. Each
//! pair has one GPU of the host, so all pairs change at the same time.
//!
//! ```text
//! lease of the first rule ─► change to the second rule ─► requests are refused ─► end of the lease ─► the change
//! ```

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::Instant,
};

use gpush_api::{ApiError, EndReason, GpuProcesses, LeaseGrant, Operation, OperationState};
use gpush_tests::agent::parse;
use serde_json::json;

use super::{
    changes,
    model::Share,
    rules::{Layout, Rule},
    steps,
    world::{World, body},
};

/// How the rules change while the GPUs are leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Reload,
    /// A reload, and an apply that is refused. A second apply, and requests, wait for the leases.
    Apply,
    /// A reload, and an apply, while a process of each lease computes.
    Process,
    /// An administrator applies the layout of the second rule, if both rules have mode `mig`.
    Override,
    /// The file changes while gpushd does not run.
    Restart,
    AutoReconcile,
}

/// The kinds, each with its rule and the share that is leased.
const KINDS: [(Rule, Share); 5] = [
    (Rule::Whole, Share::Whole),
    (Rule::Timeslice, Share::Timeslice),
    (Rule::Mps, Share::Mps(50)),
    (Rule::Mig(Layout::PLAIN), Share::Mig("3g.40gb")),
    (Rule::Mig(Layout::SHARED), Share::Mps(50)),
];

/// A GPU, the rule and the share of its lease, and its second rule.
#[derive(Debug, Clone, Copy)]
struct Pair {
    gpu: usize,
    first: Rule,
    leased: Share,
    second: Rule,
}

impl Pair {
    fn all() -> Vec<Self> {
        let pairs = KINDS.iter().flat_map(|first| KINDS.iter().map(move |second| (*first, second.0)));
        let pairs = pairs.filter(|((first, _), second)| first != second).enumerate();
        pairs.map(|(gpu, ((first, leased), second))| Self { gpu, first, leased, second }).collect()
    }

    /// Returns whether the GPU changes its mode when the lease ends.
    fn is_mode_pending(self, change: Change) -> bool {
        change != Change::Override && !self.first.changes_devices_only(self.second)
    }

    /// Returns the shares that gpushd must refuse after a change. A refused override is not pending, so the rule in
    /// force still gives shares of its own kind.
    fn refused_after(self, change: Change) -> Vec<Share> {
        let shares = [Share::Whole, Share::Timeslice, Share::Mps(50), Share::Mig("3g.40gb")];
        let is_pending = change != Change::Override;
        shares.into_iter().filter(|share| is_pending || share.kind() != self.leased.kind()).collect()
    }
}

/// The answers to requests that gpushd must refuse.
#[derive(Debug, Default)]
struct Refusals {
    total: usize,
    /// Requests that gpushd granted.
    granted: Vec<String>,
    /// Errors that do not name the lease that delays the change.
    without_lease: Vec<String>,
}

impl Refusals {
    /// Requests shares that overlap the lease of a pair.
    fn check(&mut self, world: &World, pair: Pair, change: Change, id: &str) {
        for share in pair.refused_after(change) {
            self.total += 1;
            let what = format!("{change:?}, {pair:?}: {share:?}");
            match world.observed.request(world.agent(), &body(share, 1, Some(pair.gpu), 0)) {
                Ok(grant) => self.granted.push(format!("{what}: {}", grant.lease.id)),
                Err(error) if pair.is_mode_pending(change) && !names(&error, id) => {
                    self.without_lease.push(format!("{what}: {error:?}"));
                }
                Err(_) => {}
            }
        }
    }
}

/// Checks that gpushd shows no process of a lease as unleased, although the new rules may require a lease of another
/// kind.
fn check_processes(world: &World) -> Result<(), String> {
    let shown: GpuProcesses = serde_json::from_value(world.agent().get("/v1/processes").json()).expect("processes");
    match shown.processes.iter().find(|process| process.unleased.is_some()) {
        Some(process) => Err(format!("a process of a lease is shown as unleased: {process:?}")),
        None => Ok(()),
    }
}

/// Returns whether an error names a lease.
fn names(error: &ApiError, id: &str) -> bool {
    let words = |text: &str| text.split(|c: char| !c.is_alphanumeric()).any(|word| word == id);
    words(&error.message) || error.causes.iter().any(|cause| words(cause))
}

/// Gives each GPU its first rule, and leases it. Returns the leases.
fn lease(world: &mut World, pairs: &[Pair]) -> Result<BTreeMap<usize, String>, String> {
    world.auto_reconcile = false;
    let first: Vec<Rule> = pairs.iter().map(|pair| pair.first).collect();
    changes::reload_rules(world, &first, true)?;
    changes::apply_all(world)?;
    let mut leases = BTreeMap::new();
    for pair in pairs {
        let before: Vec<String> = world.model.open.keys().cloned().collect();
        steps::request_share(world, pair.leased, 1, Some(pair.gpu), 0)?;
        let new = world.model.open.keys().find(|id| !before.contains(id)).cloned();
        leases.insert(pair.gpu, new.ok_or("no lease was granted")?);
    }
    world.check()?;
    Ok(leases)
}

/// Begins to apply the desired state of a GPU, when its lease has ended.
fn apply_later(world: &World, gpu: usize) -> Result<Operation, String> {
    let body = json!({ "selectors": [gpu.to_string()], "layout_source": "wanted", "wait_s": 600 });
    let begun = world.agent().begin_with(&body).map_err(|error| format!("GPU {gpu}: {error:?}"))?;
    if begun.state.is_final() { Err(format!("GPU {gpu}: {begun:?}")) } else { Ok(begun) }
}

/// A request that waits for a share of the second rule.
struct Queued {
    share: Share,
    stream: UnixStream,
    /// Whether the change enables or disables MIG mode. Then gpushd refuses the request, because the GPU does not have
    /// the MIG devices, or may lose them.
    changes_mig_mode: bool,
}

impl Queued {
    /// Sends the request.
    fn send(world: &World, pair: Pair) -> Self {
        let share = KINDS.iter().find(|(rule, _)| *rule == pair.second).expect("a kind").1;
        let mut body = body(share, 1, Some(pair.gpu), 0);
        body["wait"] = json!("600s");
        let body = body.to_string();
        let head = "POST /v1/leases HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\ncontent-type: application/json";
        let mut stream = world.agent().connect();
        let text = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(text.as_bytes()).expect("a request can be sent");
        Self { share, stream, changes_mig_mode: pair.first.layout().is_some() != pair.second.layout().is_some() }
    }

    /// Waits for the grant. If the change concerns MIG mode, gpushd may instead have refused the request because of the
    /// lease `id`.
    fn receive(mut self, world: &mut World, id: &str) -> Result<(), String> {
        let mut bytes = Vec::new();
        self.stream.read_to_end(&mut bytes).map_err(|error| format!("{:?} is not granted: {error}", self.share))?;
        let answer = parse(&bytes).ok_or("no answer")?;
        if answer.status != 200 {
            let error = answer.error();
            world.count(format!("queued {:?}: refused", self.share));
            return if self.changes_mig_mode && names(&error, id) {
                Ok(())
            } else {
                Err(format!("{:?} is not granted: {error:?}", self.share))
            };
        }
        world.count(format!("queued {:?}: granted", self.share));
        let grant: LeaseGrant = serde_json::from_value(answer.json()).expect("a grant");
        world.granted(&grant, self.share, 1)?;
        world.check()?;
        steps::end(world, &grant.lease.id.to_string(), EndReason::Released)
    }
}

/// An apply that waits for the end of a lease, and a request that waits for the apply.
struct Waiting {
    operation: Operation,
    queued: Option<Queued>,
}

/// Ends the processes and the leases. For each GPU whose apply waits, waits until the apply has ended.
fn end_leases(
    world: &mut World,
    leases: &BTreeMap<usize, String>,
    mut waiting: BTreeMap<usize, Waiting>,
) -> Result<(), String> {
    while steps::end_any_process(world) {}
    for (gpu, id) in leases {
        steps::end(world, id, EndReason::Released)?;
        let Some(Waiting { operation, queued }) = waiting.remove(gpu) else { continue };
        let ended = world.agent().follow(world.agent().operation(&operation.id));
        if ended.state != OperationState::Done {
            return Err(format!("GPU {gpu}: the apply that waited ended as {ended:?}"));
        }
        world.settled(*gpu)?;
        if let Some(queued) = queued {
            queued.receive(world, id)?;
        }
    }
    Ok(())
}

/// Changes all pairs in one way, with the checks of the random steps.
fn change_all(world: &mut World, pairs: &[Pair], change: Change, refusals: &mut Refusals) -> Result<(), String> {
    let leases = lease(world, pairs)?;
    let second: Vec<Rule> = pairs.iter().map(|pair| pair.second).collect();
    if change == Change::Process {
        for id in leases.values() {
            steps::start_process_of(world, id)?;
        }
        world.agent().settle_reads();
    }
    match change {
        Change::Reload | Change::Apply | Change::Process => changes::reload_rules(world, &second, false)?,
        Change::AutoReconcile => {
            world.auto_reconcile = true;
            changes::reload_rules(world, &second, false)?;
        }
        Change::Restart => changes::restart_with(world, &second, true),
        Change::Override => {}
    }
    world.check()?;
    for pair in pairs {
        match (change, pair.second.layout()) {
            (Change::Apply | Change::Process, _) => changes::apply_desired(world, pair.gpu)?,
            (Change::Override, Some(layout)) if pair.first.layout().is_some() => {
                changes::apply_layout(world, pair.gpu, layout)?;
            }
            _ => {}
        }
    }
    world.check()?;
    check_processes(world)?;
    let granted = refusals.granted.len();
    for pair in pairs {
        refusals.check(world, *pair, change, &leases[&pair.gpu]);
    }
    if refusals.granted.len() > granted {
        return Err("shares of leased GPUs were granted".to_owned());
    }
    let mut waiting = BTreeMap::new();
    if change == Change::Apply {
        for pair in pairs.iter().filter(|pair| !world.model.gpus[pair.gpu].is_settled()) {
            let operation = apply_later(world, pair.gpu)?;
            // A user may have 16 waiting requests.
            let queued = (pair.gpu % 2 == 0).then(|| Queued::send(world, *pair));
            waiting.insert(pair.gpu, Waiting { operation, queued });
        }
    }
    world.check()?;
    end_leases(world, &leases, waiting)?;
    // Without auto_reconcile, gpushd shows the difference. With it, gpushd changes the GPUs whose rule
    // has mode `mig` or `mps`.
    if change == Change::AutoReconcile {
        changes::reload_rules(world, &second, false)?;
    }
    world.refresh()?;
    world.check()
}

#[test]
fn leased_gpu_keeps_its_rule_until_the_lease_ends() {
    let pairs = Pair::all();
    let first: Vec<Rule> = pairs.iter().map(|pair| pair.first).collect();
    let mut refusals = Refusals::default();
    let mut world = World::up(&first, first.len(), None);
    let mut found = Vec::new();
    for change in
        [Change::Reload, Change::Apply, Change::Process, Change::Override, Change::Restart, Change::AutoReconcile]
    {
        let began = Instant::now();
        if let Err(why) = change_all(&mut world, &pairs, change, &mut refusals) {
            found.push(format!("{change:?}: {why}"));
            drop(world);
            world = World::up(&first, first.len(), None);
        }
        println!("{change:?}: {:?}", began.elapsed());
    }
    println!("{} refusals, {} do not name the lease", refusals.total, refusals.without_lease.len());
    for (what, times) in &world.counts {
        println!("{times:>6}  {what}");
    }
    let Refusals { granted, without_lease, .. } = &refusals;
    assert!(found.is_empty(), "{found:#?}\n{granted:#?}\n{without_lease:#?}\n{}", world.log());
    assert!(without_lease.is_empty(), "{without_lease:#?}");
}
