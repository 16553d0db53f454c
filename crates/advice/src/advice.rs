//! The advice for the GPUs of a host: one answer for each model.

use gpush_api::{ApiError, Code, Gpu, GpuIndex};
use gpush_core::config::{Isolation, Workload};
use serde::Serialize;

use crate::{
    config_lines::{RuleText, processes, rule},
    decision_tree::{PathStep, Question, TreeAnswer, walk},
    fit::{InstanceFit, Placed, fit, most_instances},
    leaf::Leaf,
    needs::{DriverOwner, Needs},
    packing_bound::{Demand, Packing, packing},
};

/// The advice for a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// Number of tenants that need a place.
    pub tenants: u32,
    /// Number of tenants that have a place at a time.
    pub places: u32,
    /// The answer for each model, in the order of the GPUs.
    pub models: Vec<ModelAdvice>,
    /// The lines for the config of gpushd.
    pub text: String,
}

/// The advice for the GPUs of one model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModelAdvice {
    /// Indexes of the GPUs.
    #[serde(rename = "indexes")]
    pub gpus: Vec<GpuIndex>,
    /// Product name.
    pub name: String,
    /// Memory slices of one GPU; 0 without MIG.
    #[serde(skip)]
    pub memory_slices: u8,
    /// The answer; `None` if no tenant fits on the model.
    pub advised: Option<Leaf>,
    /// The questions that led to the answer.
    #[serde(rename = "answers")]
    pub reasons: Vec<PathStep>,
    /// Tenants on one GPU at a time.
    pub tenants_per_gpu: u32,
    /// Entries of the layout of each GPU; empty without MIG.
    pub entries: Vec<String>,
    /// Profiles that fit in addition to the layout.
    pub also_fits: Vec<String>,
    /// The instances of one GPU with those that fit in addition, in the order of their places.
    pub placed: Vec<Placed>,
    /// The packing bound of one GPU.
    pub packing: Packing,
    /// The trade-off of the answer.
    pub trade_off: Option<&'static str>,
    /// The requirements in addition to gpush, and the limits of the answer.
    pub limits: Option<&'static str>,
    /// Further remarks, as clauses.
    pub notes: Vec<String>,
}

/// Returns the advice for GPUs, which must have their profiles.
///
/// # Errors
/// There is no GPU, the needs contradict each other, or a tenant does not fit on any GPU.
pub fn advise(needs: &Needs, gpus: &[Gpu]) -> Result<Advice, ApiError> {
    needs.check()?;
    if gpus.is_empty() {
        return Err(
            ApiError::new(Code::NotFound, "the host has no GPU").hint("name another host: `--offline dgx-a100`")
        );
    }
    needs.check_memory(gpus.iter().map(|gpu| (gpu.name.as_str(), gpu.memory.total_mib)))?;
    let demand = needs.demand.memory_mib.unwrap_or_default();
    let usable = gpus.iter().filter(|gpu| gpu.memory.total_mib >= demand).count();
    let usable = u32::try_from(usable).unwrap_or(u32::MAX).max(1);
    let least = needs.tenants.div_ceil(usable);
    let (mut places, mut models, mut rules) = on_models(needs, gpus, least);
    // Some models may have room for fewer tenants, so the other models must take more.
    for wanted in least.saturating_add(1)..=MOST_LEASES {
        if places >= needs.tenants {
            break;
        }
        let more = on_models(needs, gpus, wanted);
        if more.0 > places {
            (places, models, rules) = more;
        }
    }
    let tables = [processes(needs)].into_iter().chain(rules.iter().map(String::as_str));
    let text = tables.filter(|table| !table.is_empty()).collect::<Vec<_>>().join("\n");
    if needs.tenants > 1 && least == 1 {
        let note = "the host has a GPU for each tenant, so `mode = \"exclusive\"` is enough";
        models.iter_mut().for_each(|model| model.notes.push(note.to_owned()));
    }
    Ok(Advice { tenants: needs.tenants, places, models, text })
}

/// Returns the answer for each model if each GPU should take `wanted` tenants, with the places on the host and the rules.
fn on_models(needs: &Needs, gpus: &[Gpu], wanted: u32) -> (u32, Vec<ModelAdvice>, Vec<String>) {
    let groups = by_model(gpus);
    let (models, rules): (Vec<_>, Vec<_>) = groups.iter().map(|group| of_model(needs, group, wanted)).unzip();
    let places = models.iter().map(|model| count(&model.gpus).saturating_mul(model.tenants_per_gpu));
    (places.fold(0, u32::saturating_add), models, rules)
}

/// The packing bound of one model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModelPacking {
    /// Indexes of the GPUs.
    #[serde(rename = "indexes")]
    pub gpus: Vec<GpuIndex>,
    /// Product name.
    pub name: String,
    /// The bound of one GPU.
    pub packing: Packing,
}

/// Returns the packing bound of each model of a host.
#[must_use]
pub fn packing_of_models(demand: &Demand, gpus: &[Gpu]) -> Vec<ModelPacking> {
    let of = |group: Vec<&Gpu>| {
        let gpu = group.first()?;
        let bound = packing(demand, gpu.memory.total_mib, most_instances(gpu, demand));
        Some(ModelPacking { gpus: group.iter().map(|gpu| gpu.index).collect(), name: gpu.name.clone(), packing: bound })
    };
    by_model(gpus).into_iter().filter_map(of).collect()
}

fn count(gpus: &[GpuIndex]) -> u32 {
    u32::try_from(gpus.len()).unwrap_or(u32::MAX)
}

/// Returns the GPUs of each model, in the order of the first GPU of the model.
fn by_model(gpus: &[Gpu]) -> Vec<Vec<&Gpu>> {
    let mut groups: Vec<Vec<&Gpu>> = Vec::new();
    for gpu in gpus {
        match groups.iter_mut().find(|group| group.first().is_some_and(|first| first.name == gpu.name)) {
            Some(group) => group.push(gpu),
            None => groups.push(vec![gpu]),
        }
    }
    groups
}

/// Returns the answer to a question of the tree.
fn answer(needs: &Needs, has_mig: bool, question: Question) -> TreeAnswer {
    let yes = |is: bool| if is { TreeAnswer::Yes } else { TreeAnswer::No };
    match question {
        Question::Isolation if needs.tenants == 1 => TreeAnswer::OneTenant,
        Question::Isolation => match needs.isolation {
            Isolation::Hard => TreeAnswer::Hard,
            Isolation::Shared => TreeAnswer::Shared,
        },
        Question::MigSupport => yes(has_mig),
        Question::Workload => match needs.workload {
            Workload::Inference => TreeAnswer::Latency,
            Workload::Training | Workload::Batch | Workload::Notebooks | Workload::Kernels => TreeAnswer::Throughput,
        },
        Question::BoundedMemory => yes(needs.bounded_memory),
        Question::Driver => match needs.driver {
            DriverOwner::Own => TreeAnswer::Own,
            DriverOwner::Managed => TreeAnswer::Managed,
        },
        Question::Bottleneck => yes(matches!(needs.workload, Workload::Kernels | Workload::Inference)),
        Question::SoftCompute => yes(needs.soft_compute),
        Question::SharedFaults => yes(needs.shared_faults),
    }
}

/// Returns the answer for the GPUs of a model, and its rule. `wanted` is the number of tenants for each GPU.
fn of_model(needs: &Needs, gpus: &[&Gpu], wanted: u32) -> (ModelAdvice, String) {
    // `by_model` makes no empty group.
    let gpu = gpus[0];
    let has_mig = gpu.mig.as_ref().is_some_and(|mig| !mig.profiles.is_empty());
    let (reasons, leaf) = walk(|question| answer(needs, has_mig, question));
    let instances = most_instances(gpu, &needs.demand);
    let packing = packing(&needs.demand, gpu.memory.total_mib, instances);
    let mut model = ModelAdvice {
        gpus: gpus.iter().map(|gpu| gpu.index).collect(),
        name: gpu.name.clone(),
        memory_slices: gpu.mig.as_ref().map_or(0, |mig| mig.memory_slices),
        advised: None,
        reasons,
        tenants_per_gpu: 0,
        entries: Vec::new(),
        also_fits: Vec::new(),
        placed: Vec::new(),
        packing,
        trade_off: None,
        limits: None,
        notes: Vec::new(),
    };
    if needs.demand.memory_mib.is_some_and(|own| own > gpu.memory.total_mib) {
        model.notes.push(format!("no tenant fits: the GPU has only {}M of memory", gpu.memory.total_mib));
        return (model, String::new());
    }
    let (leaf, found) = realised(needs, gpu, leaf, wanted, &mut model.notes);
    model.tenants_per_gpu = match (&found, leaf) {
        (Some(found), _) => found.count,
        (None, Leaf::NoSharing | Leaf::Mig) => 1,
        (None, Leaf::Mps | Leaf::Hami | Leaf::Timeslice | Leaf::ManagedTimeslice) => {
            leases(needs, &model.packing, wanted, &mut model.notes)
        }
    };
    if let Some(found) = found {
        (model.entries, model.also_fits, model.placed) = (found.layout(), found.spare, found.placed);
    }
    model.advised = Some(leaf);
    model.trade_off = Some(leaf.trade_off());
    model.limits = leaf.limits();
    let lines = rule(&RuleText {
        needs,
        leaf,
        gpus: &model.gpus,
        model: &model.name,
        memory_mib: gpu.memory.total_mib,
        per_gpu: model.tenants_per_gpu,
        layout: &model.entries,
        spare: &model.also_fits,
    });
    (model, lines)
}

/// Realises the answer of the tree: with MIG instances, or with the whole GPU if no instance is large enough.
fn realised(needs: &Needs, gpu: &Gpu, leaf: Leaf, wanted: u32, notes: &mut Vec<String>) -> (Leaf, Option<InstanceFit>) {
    if leaf != Leaf::Mig {
        return (leaf, None);
    }
    match fit(gpu, &needs.demand, wanted) {
        Some(found) => {
            if found.count == 1 && wanted > 1 {
                notes.push(format!(
                    "only one instance of {} fits on the GPU, so the tenants cannot share it",
                    found.profile
                ));
            }
            (leaf, Some(found))
        }
        None => {
            notes.push("no MIG instance is large enough for a tenant, so each tenant needs a whole GPU".to_owned());
            (Leaf::NoSharing, None)
        }
    }
}

/// Most leases on one GPU if neither the demand nor the workload limits them.
const MOST_LEASES: u32 = 8;

/// Returns the number of leases on a GPU that is shared without MIG: as many as wanted, but at most as many as fit, and
/// as are usual.
fn leases(needs: &Needs, packing: &Packing, wanted: u32, notes: &mut Vec<String>) -> u32 {
    let usual = needs.workload.usual_leases().map_or(MOST_LEASES, |usual| *usual.end());
    let fit = packing.most_tenants.unwrap_or(u32::MAX).max(1);
    let most = usual.min(fit);
    if usual < wanted && usual < fit {
        let tenants = if usual == 1 { "1 tenant" } else { &format!("{usual} tenants") };
        notes.push(format!("for `{}`, at most {tenants} on a GPU at a time are usual", needs.workload.name()));
    }
    wanted.max(2).min(most)
}

#[cfg(test)]
mod tests;
