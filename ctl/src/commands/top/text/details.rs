//! All that is known about a row.

use gpush_api::{ClockLimit, DeviceActivity, Gpu, GpuProcess, GpuUsage, SignalSource};

use super::bars::bars;
use crate::{
    commands::top::{
        activity::{Activity, Unknown},
        answers::HostAnswers,
        history::{FigureHistory, PastFigures},
        tree::{Item, LeaseItem, Node},
    },
    render::{
        Appearance,
        appearance::{QUIET, STRONG, USED, gib, pad, paint, pci, product},
        bar,
        lease::{self, Surroundings},
        names, process_names, slices,
    },
};

/// Width of the column with the names of values.
const NAMES: usize = 14;

/// Draws the details of a row, with its history.
pub(in super::super) fn lines(
    node: &Node<'_>,
    answers: &HostAnswers,
    history: &FigureHistory,
    look: &Appearance,
) -> Vec<String> {
    match &node.item {
        Item::Gpu { gpu, usage } => of_gpu(node, gpu, *usage, answers, history, look),
        Item::Instance { gpu, instance } => {
            let name = format!("{}@{} of GPU {}", look.clean(&instance.profile), instance.placement.start, gpu.index);
            let usage = answers.usage.gpu_usage.iter().find(|usage| usage.gpu_uuid == gpu.uuid);
            let sampled = usage.and_then(|usage| usage.instance_usage.iter().find(|one| one.gi == instance.id));
            let mut out = vec![paint(STRONG, &name)];
            out.extend(fact("GPU instance", &instance.id.to_string(), look));
            out.extend(activity(node, sampled.map(|one| &one.activity), usage, look));
            out.extend(memory(node, look));
            out.extend(past(node, None, history, look));
            out
        }
        Item::Lease(item) => of_lease(node, item, answers, history, look),
        Item::Waiting(waiting) => {
            lease::one(waiting, &answers.status.gpus, &surroundings(answers), look).lines().map(str::to_owned).collect()
        }
        Item::Process(process) => of_process(process, look),
    }
}

fn fact(name: &str, value: &str, look: &Appearance) -> Vec<String> {
    let first = format!("  {}", pad(name, NAMES));
    let lines = look.wrap(&first, value).into_iter().map(|line| match line.strip_prefix(&first) {
        Some(rest) => format!("{}{rest}", paint(QUIET, &first)),
        None => line,
    });
    lines.collect()
}

fn of_gpu(
    node: &Node<'_>,
    gpu: &Gpu,
    usage: Option<&GpuUsage>,
    answers: &HostAnswers,
    history: &FigureHistory,
    look: &Appearance,
) -> Vec<String> {
    let (word, style) = names::state(gpu.state);
    let name = format!("GPU {}  {}  {}", gpu.index, look.clean(product(&gpu.name)), look.clean(pci(&gpu.pci)));
    let mut out = vec![format!("{}  {}", paint(STRONG, &name), paint(style, word))];
    if let Some(mig) = gpu.mig.as_ref().filter(|mig| mig.enabled) {
        let devices: Vec<_> = answers.status.devices.iter().filter(|device| device.gpu_uuid == gpu.uuid).collect();
        out.extend(slices::of(gpu, mig, &devices, 2, look));
    }
    out.extend(fact("UUID", gpu.uuid.as_str(), look));
    out.extend(fact("mode", gpu.mode.name(), look));
    gpu.reasons.iter().for_each(|reason| out.extend(fact("reason", &look.clean(reason), look)));
    out.extend(activity(node, usage.map(|usage| &usage.activity), usage, look));
    out.extend(memory(node, look));
    let Some(usage) = usage else { return out };
    let figure = |value: Option<f64>, unit: &str| value.map(|value| format!("{value:.0} {unit}"));
    let power = [figure(usage.power_w, "W"), figure(usage.power_limit_w, "W limit")];
    out.extend(joined("power", &power, look));
    let number = |value: Option<u32>, unit: &str| value.map(|value| format!("{value} {unit}"));
    let temperature = [number(usage.temperature_c, "C core"), number(usage.memory_temperature_c, "C memory")];
    out.extend(joined("temperature", &temperature, look));
    let clocks = [number(usage.sm_clock_mhz, "MHz SM"), number(usage.memory_clock_mhz, "MHz memory")];
    out.extend(joined("clocks", &clocks, look));
    let limits = usage.limited_by.iter().flatten().map(|limit| Some(limit_in_words(*limit).to_owned()));
    out.extend(joined("limited by", &limits.collect::<Vec<_>>(), look));
    if let Some(joules) = usage.energy_j {
        let text = format!("{}; {} of no lease", lease::energy(joules), lease::energy(usage.unattributed_j));
        out.extend(fact("energy", &text, look));
    }
    let percent = |part: Option<f64>, what: &str| part.map(|part| format!("{:.0}% {what}", part * 100.0));
    let parts = [
        percent(usage.leased, "leased"),
        percent(usage.unused, "leased without work"),
        percent(usage.unusable, "unusable"),
    ];
    out.extend(joined("GPU", &parts, look));
    out.extend(past(node, usage.power_limit_w, history, look));
    out
}

/// Draws the known values in one line; nothing if none is known.
fn joined(name: &str, values: &[Option<String>], look: &Appearance) -> Vec<String> {
    let known: Vec<&str> = values.iter().flatten().map(String::as_str).collect();
    if known.is_empty() { Vec::new() } else { fact(name, &known.join(", "), look) }
}

fn limit_in_words(limit: ClockLimit) -> &'static str {
    match limit {
        ClockLimit::Power => "the power limit",
        ClockLimit::Thermal => "the temperature",
        ClockLimit::Hardware => "the hardware, for example its power supply",
        ClockLimit::Sync => "the clocks of other GPUs",
        ClockLimit::Setting => "a setting of the administrator",
    }
}

/// Draws the activity, or why it is not known.
fn activity(
    node: &Node<'_>,
    activity: Option<&DeviceActivity>,
    usage: Option<&GpuUsage>,
    look: &Appearance,
) -> Vec<String> {
    let percent = |name: &str, ratio: Option<f64>| ratio.map(|ratio| format!("{name} {:.0}%", ratio * 100.0));
    let known = activity.map(|activity| {
        [
            percent("SM", activity.sm_activity),
            percent("occupancy", activity.occupancy),
            percent("tensor", activity.tensor_activity),
            percent("DRAM", activity.dram_activity),
            percent("kernel time", activity.busy),
        ]
    });
    let known: Vec<String> = known.into_iter().flatten().flatten().collect();
    let text = match (known.is_empty(), node.figures.activity) {
        (true, Activity::Unknown(Unknown::Failed)) => {
            let failure = usage.and_then(|usage| usage.failure.as_deref()).unwrap_or_default();
            format!("- ({}: {})", Unknown::Failed.sentence(), look.clean(failure))
        }
        (true, Activity::Unknown(why)) => format!("- ({})", why.sentence()),
        (_, Activity::Known { .. } | Activity::Above | Activity::Unknown(_)) => known.join(", "),
    };
    fact("activity", &text, look)
}

fn memory(node: &Node<'_>, look: &Appearance) -> Vec<String> {
    let Some(used) = node.figures.memory_mib else { return fact("memory", "-", look) };
    let Some(total) = node.figures.memory_total_mib else {
        return fact("memory", &format!("{} GiB", gib(used)), look);
    };
    let label = paint(QUIET, &format!("  {}", pad("memory", NAMES)));
    vec![format!("{label}{} {}/{} GiB", bar::part(used, total, 20, look), gib(used), gib(total))]
}

/// Draws a row of bars after its name; `None` if no ratio is known.
pub(super) fn row_of_bars(name: &str, ratios: Vec<Option<f64>>, look: &Appearance) -> Option<String> {
    let columns = look.width.saturating_sub(NAMES + 2).min(100);
    let label = paint(QUIET, &format!("  {}", pad(name, NAMES)));
    let is_known = ratios.iter().any(Option::is_some);
    is_known.then(|| format!("{label}{}", paint(USED, &bars(ratios.into_iter(), columns, look))))
}

/// Draws the past of a row, as far as it is known.
fn past(node: &Node<'_>, power_limit_w: Option<f64>, history: &FigureHistory, look: &Appearance) -> Vec<String> {
    let total = node.figures.memory_total_mib.filter(|total| *total > 0);
    type Ratio<'r> = Box<dyn Fn(&PastFigures) -> Option<f64> + 'r>;
    let rows: [(&str, Ratio<'_>); 3] = [
        ("activity", Box::new(|moment| moment.activity)),
        ("memory", Box::new(move |moment| Some(moment.memory_mib? as f64 / total? as f64))),
        ("power", Box::new(move |moment| Some(moment.power_w? / power_limit_w?))),
    ];
    let mut out = Vec::new();
    for (name, ratio) in rows {
        let ratios: Vec<Option<f64>> = history.of(&node.key).map(ratio).collect();
        out.extend(row_of_bars(name, ratios, look));
    }
    if !out.is_empty() {
        out.insert(0, String::new());
        out.insert(1, paint(STRONG, "History"));
    }
    out
}

/// Returns the other leases. The use of the targets is in a section of the details.
fn surroundings(answers: &HostAnswers) -> Surroundings<'_> {
    Surroundings { usage: &[], leases: &answers.status.leases, has_memory_limits: false }
}

fn of_lease(
    node: &Node<'_>,
    item: &LeaseItem<'_>,
    answers: &HostAnswers,
    history: &FigureHistory,
    look: &Appearance,
) -> Vec<String> {
    let shown = lease::one(item.lease, &answers.status.gpus, &surroundings(answers), look);
    let mut out: Vec<String> = shown.lines().map(str::to_owned).collect();
    out.extend([String::new(), paint(STRONG, "Use")]);
    if item.usage.is_none() {
        out.extend(fact("activity", &format!("- ({})", Unknown::Hidden.sentence()), look));
    }
    if let Some(target) = item.target {
        let percent = |ratio: Option<f64>| ratio.map(|ratio| format!("{:.0}%", ratio * 100.0));
        let estimate = if target.estimate { " (estimates: several processes share the device)" } else { "" };
        let sm = percent(target.sm_activity).map(|now| format!("SM {now} now"));
        let mean = percent(target.sm_mean).map(|mean| format!("SM {mean} on average"));
        let dram = percent(target.dram_activity).map(|now| format!("DRAM {now} now"));
        let known: Vec<String> = [sm, mean, dram].into_iter().flatten().collect();
        let text = if known.is_empty() { "-".to_owned() } else { known.join(", ") + estimate };
        out.extend(fact("activity", &text, look));
        out.extend(fact("source", source_in_words(target.source), look));
        let gib = |mib: Option<u64>, what: &str| mib.map(|mib| format!("{} GiB {what}", gib(mib)));
        let memory = [
            gib(target.memory_mib, "now"),
            gib(target.memory_peak_mib, "at most"),
            gib(target.memory_p98_mib, "in 98% of the time"),
        ];
        out.extend(joined("memory", &memory, look));
    }
    out.extend(past(node, None, history, look));
    out
}

fn source_in_words(source: SignalSource) -> &'static str {
    match source {
        SignalSource::Gpm => "GPU performance monitoring: the mean over the whole window",
        SignalSource::Utilization => "utilization: the part of the time in which a kernel ran",
        SignalSource::Processes => "utilization of each process",
        SignalSource::MemoryOnly => "only memory and processes: the GPU reports no activity in its present mode",
        SignalSource::None => "none: gpushd has no recent sample",
    }
}

fn of_process(process: &GpuProcess, look: &Appearance) -> Vec<String> {
    let one = &process.process;
    let mut out = vec![paint(STRONG, &process_names::process(one, look))];
    let device = process.device.as_ref().map_or_else(String::new, |device| format!(", {}", look.clean(device)));
    out.extend(fact("device", &format!("GPU {}{device}", process.gpu), look));
    out.extend(fact("kind", process_names::kind(one.kind), look));
    out.extend(fact("memory", &one.memory_mib.map_or_else(|| "-".to_owned(), |mib| format!("{} GiB", gib(mib))), look));
    let lease = process.lease.as_ref().map(|lease| match process.unattributed {
        false => look.clean(lease),
        true => format!("perhaps {}", look.clean(lease)),
    });
    let job = process.slurm_job.map(|job| job.to_string());
    let known = [
        ("lease", lease),
        ("Slurm job", job),
        ("serves", process.serves.as_deref().map(|text| look.clean(text))),
        ("unit", process.unit.as_deref().map(|text| look.clean(text))),
        ("cgroup", process.cgroup.as_deref().map(|text| look.clean(text))),
        ("unleased", process.unleased.as_deref().map(|text| look.clean(text))),
        ("gpushd", process.unleased_action.as_deref().map(|text| look.clean(text))),
    ];
    for (name, value) in known {
        out.extend(value.into_iter().flat_map(|value| fact(name, &value, look)));
    }
    out
}
