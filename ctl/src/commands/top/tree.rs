//! The rows of a picture, as a tree.
//!
//! ```text
//! GPU ─┬─ lease ─── process                      a whole GPU, MPS, time-slicing
//!      ├─ lease ─── process                      a lease that has a MIG device alone
//!      ├─ GPU instance ─┬─ lease ─── process     other GPU instances
//!      │                └─ process without a lease
//!      └─ process without a lease
//! waiting lease
//! ```
//!
//! The driver reports the activity of a GPU instance, not of its compute instances. So leases that share a GPU instance
//! have no figure: the row of the GPU instance shows it once.

use gpush_api::{
    Gpu, GpuInstance, GpuProcess, GpuState, GpuUsage, GpuUuid, Lease, LeaseBinding, LeaseId, LeaseMember, LeaseUsage,
    MemberShare, Process, ProcessKind, SignalSource, TargetUsage, TargetUuid,
};
use gpush_core::sharing;

use super::{
    activity::{Activity, Unknown},
    answers::HostAnswers,
};

/// Identifies a row in successive pictures.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Gpu(GpuUuid),
    Instance(GpuUuid, u32),
    Lease(LeaseId, GpuUuid, TargetUuid),
    Process(GpuUuid, Option<String>, Option<u32>, ProcessKind, usize),
    Waiting(LeaseId),
}

/// What a row shows.
#[derive(Debug, Clone)]
pub(super) enum Item<'a> {
    Gpu { gpu: &'a Gpu, usage: Option<&'a GpuUsage> },
    Instance { gpu: &'a Gpu, instance: &'a GpuInstance },
    Lease(LeaseItem<'a>),
    Process(&'a GpuProcess),
    Waiting(&'a Lease),
}

/// A lease on one of its targets.
#[derive(Debug, Clone)]
pub(super) struct LeaseItem<'a> {
    pub(super) lease: &'a Lease,
    pub(super) member: &'a LeaseMember,
    /// Name of the MIG device, such as `2g.20gb@2`; `None` for a whole GPU.
    pub(super) device: Option<String>,
    pub(super) usage: Option<&'a LeaseUsage>,
    pub(super) target: Option<&'a TargetUsage>,
}

/// The figures of a row.
#[derive(Debug, Clone)]
pub(super) struct Figures {
    pub(super) activity: Activity,
    pub(super) memory_mib: Option<u64>,
    pub(super) memory_total_mib: Option<u64>,
    pub(super) power_w: Option<f64>,
}

/// A row, and the rows below it.
#[derive(Debug, Clone)]
pub(super) struct Node<'a> {
    pub(super) key: Key,
    pub(super) item: Item<'a>,
    pub(super) figures: Figures,
    pub(super) children: Vec<Node<'a>>,
}

impl Node<'_> {
    /// Returns the lease of the row, if it is a row of a lease.
    pub(super) fn lease(&self) -> Option<&Lease> {
        match &self.item {
            Item::Lease(item) => Some(item.lease),
            Item::Waiting(lease) => Some(lease),
            Item::Gpu { .. } | Item::Instance { .. } | Item::Process(_) => None,
        }
    }
}

/// Returns the Slurm job of a lease.
pub(super) fn job_of(lease: &Lease) -> Option<u32> {
    match &lease.binding {
        LeaseBinding::Job { job, .. } => Some(*job),
        LeaseBinding::Scope { .. }
        | LeaseBinding::Cgroup { .. }
        | LeaseBinding::Process { .. }
        | LeaseBinding::Time
        | LeaseBinding::None => None,
    }
}

/// Returns the rows of a host: its GPUs, and then the waiting leases.
pub(super) fn of(answers: &HostAnswers) -> Vec<Node<'_>> {
    let gpus = answers.status.gpus.iter().map(|gpu| gpu_node(gpu, answers));
    let waits = |lease: &&Lease| lease.members.is_empty() && lease.ended_at.is_none();
    let waiting = answers.status.leases.iter().filter(waits).map(|lease| Node {
        key: Key::Waiting(lease.id),
        item: Item::Waiting(lease),
        figures: Figures {
            activity: Activity::Unknown(Unknown::Waits),
            memory_mib: None,
            memory_total_mib: None,
            power_w: None,
        },
        children: Vec::new(),
    });
    gpus.chain(waiting).collect()
}

fn gpu_node<'a>(gpu: &'a Gpu, answers: &'a HostAnswers) -> Node<'a> {
    let usage = answers.usage.gpu_usage.iter().find(|usage| usage.gpu_uuid == gpu.uuid);
    let instances: &[GpuInstance] = match &gpu.mig {
        // The present instances of a lost GPU are not known.
        Some(mig) if mig.enabled && gpu.state != GpuState::Lost => &mig.instances,
        _ => &[],
    };
    let mut leases: Vec<LeaseItem<'a>> = leases_on(gpu, instances, answers).collect();
    let mut processes: Vec<&GpuProcess> =
        answers.processes().iter().filter(|process| process.gpu_uuid == gpu.uuid).collect();
    let of_gpu = Activity::of_gpu(gpu, usage);
    let mut children = Vec::new();
    for instance in instances {
        let has_target = |target: &TargetUuid| instance.compute.iter().any(|one| one.uuid.as_ref() == Some(target));
        let (inside, outside) = leases.into_iter().partition(|item| has_target(&item.member.target));
        leases = outside;
        let names: Vec<String> =
            instance.compute.iter().map(|compute| sharing::device_name(instance, compute)).collect();
        let is_inside = |process: &&GpuProcess| process.device.as_ref().is_some_and(|name| names.contains(name));
        let (its, others) = processes.into_iter().partition(is_inside);
        processes = others;
        children.extend(instance_nodes(gpu, instance, usage, inside, its));
    }
    for item in leases {
        let own = Activity::of_target(item.target, item.usage);
        // A lease of the whole GPU has the figure of the GPU.
        let has_figure_above = item.member.share == MemberShare::Whole && of_gpu.ratio().is_some();
        let activity = if own.ratio().is_none() && has_figure_above { Activity::Above } else { own };
        children.push(lease_node(item, activity, &mut processes));
    }
    children.extend(processes.into_iter().enumerate().map(process_node));
    let memory = Some(gpu.memory).filter(|memory| memory.total_mib > 0);
    let figures = Figures {
        activity: of_gpu,
        memory_mib: usage.and_then(|usage| usage.memory_used_mib),
        memory_total_mib: memory.map(|memory| memory.total_mib),
        power_w: usage.and_then(|usage| usage.power_w),
    };
    Node { key: Key::Gpu(gpu.uuid.clone()), item: Item::Gpu { gpu, usage }, figures, children }
}

/// Returns each target that a lease holds on a GPU.
fn leases_on<'a>(
    gpu: &'a Gpu,
    instances: &'a [GpuInstance],
    answers: &'a HostAnswers,
) -> impl Iterator<Item = LeaseItem<'a>> {
    let open = answers.status.leases.iter().filter(|lease| lease.state.holds_capacity());
    open.flat_map(move |lease| {
        let usage = answers.usage.lease_usage.iter().find(|usage| usage.lease_id == lease.id);
        let here = lease.members.iter().filter(|member| member.gpu_uuid == gpu.uuid);
        here.map(move |member| {
            let mut devices = instances.iter().flat_map(|one| one.compute.iter().map(move |compute| (one, compute)));
            let device = devices.find(|(_, compute)| compute.uuid.as_ref() == Some(&member.target));
            let is_same = |target: &&TargetUsage| target.target == member.target && target.gpu_uuid == member.gpu_uuid;
            LeaseItem {
                lease,
                member,
                device: device.map(|(instance, compute)| sharing::device_name(instance, compute)),
                usage,
                target: usage.and_then(|usage| usage.target_usage.iter().find(is_same)),
            }
        })
    })
}

/// Returns the rows of a GPU instance. If one lease has the whole instance, this is the row of the lease.
fn instance_nodes<'a>(
    gpu: &'a Gpu,
    instance: &'a GpuInstance,
    usage: Option<&'a GpuUsage>,
    leases: Vec<LeaseItem<'a>>,
    mut processes: Vec<&'a GpuProcess>,
) -> Vec<Node<'a>> {
    let sampled = usage.and_then(|usage| usage.instance_usage.iter().find(|one| one.gi == instance.id));
    let memory_mib = sampled.and_then(|one| one.memory_used_mib);
    let memory_total_mib = instance.memory.map(|memory| memory.total_mib);
    let activity = Activity::of_instance(usage, sampled);
    if let ([item], [_]) = (leases.as_slice(), instance.compute.as_slice())
        && processes.iter().all(|process| belongs(process, item))
    {
        let mut node = lease_node(item.clone(), activity, &mut processes);
        node.figures.memory_total_mib = memory_total_mib;
        return vec![node];
    }
    let mut children = Vec::new();
    for item in leases {
        // The figure of the instance is in the row above. Figures of single processes are no such figure.
        let activity = match item.target {
            Some(target) if target.source == SignalSource::Processes => Activity::of_target(Some(target), item.usage),
            Some(_) | None => Activity::Above,
        };
        children.push(lease_node(item, activity, &mut processes));
    }
    children.extend(processes.into_iter().enumerate().map(process_node));
    let figures = Figures { activity, memory_mib, memory_total_mib, power_w: None };
    let key = Key::Instance(gpu.uuid.clone(), instance.id);
    vec![Node { key, item: Item::Instance { gpu, instance }, figures, children }]
}

/// Returns whether a process runs with a lease on this target.
fn belongs(process: &GpuProcess, item: &LeaseItem<'_>) -> bool {
    process.lease.as_ref().is_some_and(|lease| *lease == item.lease.id.to_string()) && process.device == item.device
}

/// Returns the row of a lease. Takes its processes out of `processes`.
fn lease_node<'a>(item: LeaseItem<'a>, activity: Activity, processes: &mut Vec<&'a GpuProcess>) -> Node<'a> {
    let (its, others): (Vec<_>, Vec<_>) = processes.iter().copied().partition(|process| belongs(process, &item));
    *processes = others;
    let LeaseItem { lease, member, target, .. } = &item;
    let figures = Figures {
        activity,
        memory_mib: target.and_then(|target| target.memory_mib),
        memory_total_mib: match member.share {
            MemberShare::Timeslice { .. } => None,
            MemberShare::Mig { .. } | MemberShare::Mps { .. } | MemberShare::Whole => {
                Some(member.memory_mib).filter(|mib| *mib > 0)
            }
        },
        power_w: None,
    };
    let key = Key::Lease(lease.id, member.gpu_uuid.clone(), member.target.clone());
    let children = its.into_iter().enumerate().map(process_node).collect();
    Node { key, item: Item::Lease(item), figures, children }
}

fn process_node((at, process): (usize, &GpuProcess)) -> Node<'_> {
    let Process { pid, kind, .. } = &process.process;
    let (pid, kind) = (*pid, *kind);
    // Processes of other users have no pid, so number them.
    let number = if pid.is_some() { 0 } else { at };
    Node {
        key: Key::Process(process.gpu_uuid.clone(), process.device.clone(), pid, kind, number),
        item: Item::Process(process),
        figures: Figures {
            activity: Activity::Unknown(Unknown::OfProcess),
            memory_mib: process.process.memory_mib,
            memory_total_mib: None,
            power_w: None,
        },
        children: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::samples;

    /// Describes a tree in one line: `L17(p)` is the lease L17 with a process.
    fn outline(nodes: &[Node<'_>]) -> String {
        let one = |node: &Node<'_>| {
            let name = match &node.item {
                Item::Gpu { gpu, .. } => format!("GPU{}", gpu.index),
                Item::Instance { instance, .. } => instance.profile.clone(),
                Item::Lease(item) => item.lease.id.to_string(),
                Item::Process(_) => "p".to_owned(),
                Item::Waiting(lease) => format!("waiting:{}", lease.id),
            };
            let below = outline(&node.children);
            if below.is_empty() { name } else { format!("{name}({below})") }
        };
        nodes.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn leases_and_processes_are_below_their_gpu() {
        let answers = samples::host();
        insta::assert_snapshot!(outline(&of(&answers)));
    }

    /// The devices of one GPU instance share one figure.
    #[test]
    fn leases_of_a_split_instance_share_its_figure() {
        let answers = samples::host();
        let nodes = of(&answers);
        let mut instances = nodes.iter().flat_map(|node| &node.children);
        let split = instances.find(|node| matches!(node.item, Item::Instance { .. }) && node.children.len() > 1);
        let split = split.unwrap();
        assert!(split.figures.activity.ratio().is_some());
        let leases = split.children.iter().filter(|node| node.lease().is_some());
        assert!(leases.clone().count() > 1);
        for lease in leases {
            assert!(matches!(lease.figures.activity, Activity::Above), "{:?}", lease.key);
        }
    }

    /// GPUs before Hopper report one figure for the whole GPU.
    #[test]
    fn lease_of_a_whole_gpu_refers_to_the_figure_of_the_gpu() {
        let mut answers = samples::host();
        let lease = answers.status.leases.iter_mut().find(|lease| lease.id == LeaseId(18)).unwrap();
        lease.members[0].share = MemberShare::Whole;
        let activity = |answers: &HostAnswers| {
            let nodes = of(answers);
            let mut leases = nodes.iter().flat_map(|node| &node.children);
            let lease = leases.find(|node| node.lease().is_some_and(|lease| lease.id == LeaseId(18)));
            lease.unwrap().figures.activity
        };
        assert!(activity(&answers).ratio().is_some(), "the lease has its figure");
        let usage = answers.usage.lease_usage.iter_mut().find(|usage| usage.lease_id == LeaseId(18)).unwrap();
        usage.target_usage[0].sm_activity = None;
        assert_eq!(activity(&answers), Activity::Above);
    }
}
