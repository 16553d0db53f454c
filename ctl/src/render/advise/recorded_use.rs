//! Draws `gpushctl advise from-use`.

use gpush_advice::{
    Confidence, Evidence, GpuLayout, LayoutAdvice, MOST_REFUSALS, NoAdvice, ObservedNeed, P98_MARGIN, PEAK_MARGIN,
    ShareDemand, SizeAdvice, SizeTotals, SizeVerdict, Uncertainty, WHOLE,
};
use gpush_api::{Gpu, GpuIndex, text::local_time};
use gpush_core::duration;
use jiff::Timestamp;
use serde::Serialize;

use super::{Labelled, remark};
use crate::{
    args::typed,
    render::{
        Appearance,
        appearance::{STRONG, count, gib, paint},
        names::gpu_numbers,
        table::{Align, table},
    },
};

/// Maximum number of leases that are drawn, except with `-o wide`.
const MOST_DRAWN: usize = 20;

/// The output of `gpushctl advise from-use --json`.
#[derive(Debug, Serialize)]
pub(crate) struct FromUse {
    /// Start of the period.
    pub(crate) from: Timestamp,
    /// End of the period.
    #[serde(rename = "period_end")]
    pub(crate) until: Timestamp,
    /// What the advice is about.
    pub(crate) subject: &'static str,
    /// Whether the period has older leases, which are left out.
    pub(crate) has_older_leases: bool,
    /// Whether the leases are named in the command: then each is drawn, also without advice.
    #[serde(skip)]
    pub(crate) is_named: bool,
    /// Whether the caller sees only their own leases.
    #[serde(skip)]
    pub(crate) is_own: bool,
    /// The advice for leases.
    pub(crate) size_advice: Vec<SizeAdvice>,
    /// The advice for users or GPUs.
    pub(crate) size_totals: Vec<SizeTotals>,
    /// The advice for the layouts of the host.
    pub(crate) layout_advice: Option<LayoutAdvice>,
}

/// Draws the advice. `gpus` are the GPUs of the host.
pub(crate) fn from_use(found: &FromUse, gpus: &[Gpu], look: &Appearance) -> String {
    let period = format!("Recorded use from {} to {}.", local_time(found.from), local_time(found.until));
    let mut out = lines(&period, look);
    if found.has_older_leases {
        out += &remark("The period has older leases, which are left out. Name a later start with --since.", look);
    }
    out.push('\n');
    if let Some(advice) = &found.layout_advice {
        return out + &of_host(advice, look);
    }
    if found.size_advice.is_empty() && found.size_totals.is_empty() {
        let text = if found.is_own {
            "You held no such lease in this period, or gpushd does not record the use (`history.days = 0`). You see only \
             your own leases."
        } else {
            "No lease was held in this period, or gpushd does not record the use (`history.days = 0`)."
        };
        return out + &lines(text, look);
    }
    if found.size_totals.is_empty() {
        let leases = &found.size_advice;
        return out + &if found.is_named { of_named(leases, look) } else { of_leases(leases, look) };
    }
    out + &of_groups(found, gpus, look)
}

fn lines(text: &str, look: &Appearance) -> String {
    look.wrap("", text).iter().map(|line| format!("{line}\n")).collect()
}

/// Draws the leases for which a smaller share is advised, and says why there is no advice for the others.
fn of_leases(all: &[SizeAdvice], look: &Appearance) -> String {
    let advised: Vec<&SizeAdvice> = all.iter().filter(|advice| advice.is_smaller()).collect();
    let drawn = if look.wide { advised.len() } else { advised.len().min(MOST_DRAWN) };
    let mut out: String = advised[..drawn].iter().map(|advice| of_lease(advice, look) + "\n").collect();
    if advised.is_empty() {
        out += "No smaller share is advised.\n\n";
    }
    if drawn < advised.len() {
        out += &lines(&format!("{} more: add `-o wide`.", count(advised.len() - drawn, "lease")), look);
    }
    for why in WITHOUT_ADVICE {
        let ids: Vec<String> = all
            .iter()
            .filter(|advice| advice.verdict == SizeVerdict::None { why })
            .map(|advice| advice.lease_id.to_string())
            .collect();
        if !ids.is_empty() {
            let shown = ids.iter().take(MOST_DRAWN).cloned().collect::<Vec<_>>().join(", ");
            let more = if ids.len() > MOST_DRAWN { ", …" } else { "" };
            out += &lines(&format!("{}: {shown}{}", no_advice(why), look.clean(more)), look);
        }
    }
    out
}

/// Draws each of the leases, with what it needed.
fn of_named(all: &[SizeAdvice], look: &Appearance) -> String {
    all.iter().map(|advice| of_lease(advice, look)).collect::<Vec<_>>().join("\n")
}

/// The reasons without advice, in the order in which they are drawn.
const WITHOUT_ADVICE: [NoAdvice; 6] = [
    NoAdvice::NeedsItsShare,
    NoAdvice::NoWork,
    NoAdvice::TooFewSamples,
    NoAdvice::NoMig,
    NoAdvice::NothingReserved,
    NoAdvice::UnknownShare,
];

/// Returns why there is no advice for leases, whose ids follow.
fn no_advice(why: NoAdvice) -> &'static str {
    match why {
        NoAdvice::NeedsItsShare => "No smaller share is enough",
        NoAdvice::TooFewSamples => "Too few samples (memory known for less than 1h)",
        NoAdvice::NoWork => "No work was seen, so the need is not known",
        NoAdvice::NoMig => "The GPU has no MIG, so it has no smaller share with memory of its own",
        NoAdvice::NothingReserved => "A time-slice replica reserves nothing",
        NoAdvice::UnknownShare => "The GPU or the profile is not known, or the device is a part of a GPU instance",
    }
}

fn of_lease(advice: &SizeAdvice, look: &Appearance) -> String {
    let gpu = advice.index.map_or_else(|| look.clean(advice.gpu_uuid.as_str()), |index| gpu_numbers(&[index]));
    let (user, share) = (look.clean(&advice.user), look.clean(&named(&advice.share)));
    let heading =
        format!("{} of {user}: {share} on {gpu}, held for {}", advice.lease_id, duration::rough(advice.held_s));
    let mut out = Labelled { out: paint(STRONG, &heading) + "\n", last: "", look };
    let need = advice.observed_need.as_ref();
    match &advice.verdict {
        SizeVerdict::SmallerDevice { profile, enough_mib, freed_slices, memory_slices } => {
            let reason = need.map_or_else(String::new, |need| format!(" ({})", fits(need, *enough_mib)));
            let text = format!("{profile} fits{reason}; frees {freed_slices} of {memory_slices} memory slices");
            out.add("advice", &text);
        }
        SizeVerdict::SmallerLimit { enough_mib, freed_mib } => {
            let reason = need.map_or_else(String::new, |need| format!(" ({})", fits(need, *enough_mib)));
            let limit = enough_mib / 1024;
            out.add("advice", &format!("--memory {limit}G is enough{reason}; frees {} GiB", gib(*freed_mib)));
        }
        SizeVerdict::None { why } => out.add("advice", no_advice(*why)),
    }
    if let Some(need) = need.filter(|_| !advice.is_smaller()) {
        let [p98, peak, needed] = [need.memory_p98_mib, need.memory_peak_mib, need.needed_mib].map(gib);
        out.add("memory", &format!("p98 {p98}, peak {peak}, with the margin {needed} GiB"));
    }
    if let Some(compute) = need.and_then(|need| need.needed_compute) {
        out.add("compute", &format!("while it works, at most {} of the GPU, with the margin", percent(compute)));
    }
    out.add("confidence", &evidence(&advice.evidence));
    out.out
}

/// Returns a share in words.
fn named(share: &str) -> String {
    match share {
        WHOLE => "whole GPU".to_owned(),
        "mps" => "MPS share".to_owned(),
        "timeslice" => "time-slice replica".to_owned(),
        profile => profile.to_owned(),
    }
}

/// Returns why a size is enough: `p98 + 15 % = 9.1 of 9.5 GiB`.
fn fits(need: &ObservedNeed, enough_mib: u64) -> String {
    let rule = if need.is_of_peak { format!("peak + {PEAK_MARGIN} %") } else { format!("p98 + {P98_MARGIN} %") };
    format!("{rule} = {} of {} GiB", gib(need.needed_mib), gib(enough_mib))
}

fn percent(part: f64) -> String {
    format!("{:.0} %", (part * 100.0).ceil())
}

/// Describes how sure an advice is.
fn evidence(evidence: &Evidence) -> String {
    let known = duration::rough(evidence.memory_known_s);
    let samples = usize::try_from(evidence.sample_count).unwrap_or(usize::MAX);
    let missing: String = evidence.uncertainties.iter().map(|one| format!("; {}", uncertainty(*one))).collect();
    format!("{}: {} over {known}{missing}", evidence.confidence.name(), count(samples, "sample"))
}

fn uncertainty(of: Uncertainty) -> &'static str {
    match of {
        Uncertainty::NoFullDay => "less than a full day",
        Uncertainty::MemoryGaps => "the memory is not known for some of the time",
        Uncertainty::NoActivity => "the activity is not known, so memory decides alone",
        Uncertainty::Estimate => "figures of programs that share a GPU are estimates",
    }
}

/// Draws the advice for users or GPUs.
fn of_groups(found: &FromUse, gpus: &[Gpu], look: &Appearance) -> String {
    let is_gpu = found.subject == "gpu";
    let key = |totals: &SizeTotals| {
        let gpu = gpus.iter().find(|gpu| is_gpu && gpu.uuid.as_str() == totals.key);
        gpu.map_or_else(|| look.clean(&totals.key), |gpu| gpu.index.to_string())
    };
    let row = |totals: &SizeTotals| {
        let enough = totals.enough.iter().map(|one| format!("{} for {}", look.clean(&one.share), one.lease_count));
        let enough = enough.collect::<Vec<_>>().join(", ");
        vec![
            key(totals),
            look.clean(&totals.share),
            totals.lease_count.to_string(),
            totals.too_few_samples.to_string(),
            if enough.is_empty() { "-".to_owned() } else { enough },
            hours(totals.held_slice_hours),
            hours(totals.freed_slice_hours),
            totals.confidence.map_or("-", Confidence::name).to_owned(),
        ]
    };
    let columns = [
        (if is_gpu { "GPU" } else { "USER" }, Align::Left),
        ("SHARE", Align::Left),
        ("LEASES", Align::Right),
        ("NO DATA", Align::Right),
        ("ENOUGH", Align::Left),
        ("HELD", Align::Right),
        ("FREED", Align::Right),
        ("CONFIDENCE", Align::Left),
    ];
    let mut out = table(&columns, found.size_totals.iter().map(row).collect(), 0, look);
    out.push('\n');
    let note = "HELD and FREED are memory slices times hours: what the leases held, and what smaller shares would have \
                freed. A lease counts from its start, which may be before the period. NO DATA is the number of leases \
                with too few samples.";
    out += &remark(note, look);
    out
}

/// Returns slice hours; nothing for shares without slices.
fn hours(hours: f64) -> String {
    if hours > 0.0 { format!("{hours:.1}") } else { "-".to_owned() }
}

/// Draws the layouts of the host.
fn of_host(advice: &LayoutAdvice, look: &Appearance) -> String {
    let tally = &advice.request_tally;
    let all = advice.replayed();
    let mut out = String::new();
    if all == 0 {
        out += "No recorded request can be replayed, so no layout is advised.\n";
    } else {
        let replayed = format!(
            "Replayed {}: {} granted, {} refused because the capacity was in use.",
            count(all, "request"),
            tally.replayed_grants,
            tally.replayed_refusals
        );
        out += &lines(&replayed, look);
        out += &lines(&result(advice, all), look);
        out.push('\n');
        let columns = [
            ("SHARE", Align::Left),
            ("REQUESTS", Align::Right),
            ("MET TODAY", Align::Right),
            ("MET WITH ADVICE", Align::Right),
        ];
        let row = |demand: &ShareDemand| {
            let numbers = [demand.requests, demand.met_today, demand.met_best].map(|number| number.to_string());
            std::iter::once(look.clean(&demand.share)).chain(numbers).collect()
        };
        out += &table(&columns, advice.demands.iter().map(row).collect(), 0, look);
        out += &layouts(advice, look);
    }
    out.push('\n');
    out + &host_notes(advice, look)
}

fn result(advice: &LayoutAdvice, all: usize) -> String {
    let LayoutAdvice { met_today, met_best, is_proven, .. } = advice;
    let no_more = if *is_proven { "no other layouts meet more" } else { "the search found none that meet more" };
    match advice.regret() {
        0 => format!("Today's layouts meet {met_today} of {all}; {no_more}. Keep them."),
        more => {
            format!("Today's layouts meet {met_today} of {all}, the advised ones {met_best}: {more} more; {no_more}.")
        }
    }
}

/// Draws the layouts of the GPUs that change, and a command that shows the change of one.
fn layouts(advice: &LayoutAdvice, look: &Appearance) -> String {
    let changed: Vec<&GpuLayout> = advice.gpu_layouts.iter().filter(|gpu| gpu.differs).collect();
    if changed.is_empty() {
        return String::new();
    }
    let text = |entries: &[String]| match entries {
        [] => "none".to_owned(),
        entries => look.clean(&entries.join(", ")),
    };
    let row = |gpu: &&GpuLayout| {
        let also = if gpu.also_fits.is_empty() { "-".to_owned() } else { text(&gpu.also_fits) };
        vec![gpu.index.to_string(), text(&gpu.present_entries), text(&gpu.entries), also]
    };
    let columns = [("GPU", Align::Left), ("TODAY", Align::Left), ("ADVISED", Align::Left), ("ALSO FITS", Align::Left)];
    let mut out = "\n".to_owned() + &table(&columns, changed.iter().map(row).collect(), 0, look);
    out.push('\n');
    let mut groups: Vec<Vec<&GpuLayout>> = Vec::new();
    for gpu in changed {
        let is_whole = |gpu: &GpuLayout| gpu.present_entries == [WHOLE];
        match groups.iter_mut().find(|group| group[0].entries == gpu.entries && is_whole(group[0]) == is_whole(gpu)) {
            Some(group) => group.push(gpu),
            None => groups.push(vec![gpu]),
        }
    }
    groups.iter().for_each(|group| out += &lines(&next(group, look), look));
    out
}

/// Says how to give GPUs their advised layout, which is the same for all of them.
fn next(group: &[&GpuLayout], look: &Appearance) -> String {
    let Some(first) = group.first() else { return String::new() };
    let indexes: Vec<GpuIndex> = group.iter().map(|gpu| gpu.index).collect();
    let list = indexes.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let (gpus, rule) = (gpu_numbers(&indexes), if group.len() == 1 { "its rule" } else { "the rules" });
    if first.entries == [WHOLE] {
        return format!("To grant {gpus} as a whole, set `mode = \"exclusive\"` in {rule}.");
    }
    if first.present_entries == [WHOLE] {
        // The rule of the GPU refuses a layout.
        let layout =
            look.clean(&first.entries.iter().map(|entry| format!("\"{entry}\"")).collect::<Vec<_>>().join(", "));
        let keys = format!("`mode = \"mig\"` and `layout = [{layout}]`");
        return format!(
            "To partition {gpus}, set {keys} in {rule}. Then see what would change: `gpushctl apply {list} --dry-run`"
        );
    }
    let layout = first.entries.join(",");
    match typed::command_line(["gpushctl", "mig", "apply", layout.as_str(), "-g", list.as_str(), "--dry-run"]) {
        Some(command) => format!("See what would change: `{command}`"),
        None => String::new(),
    }
}

/// Returns what the replay assumes, and what it leaves out.
fn host_notes(advice: &LayoutAdvice, look: &Appearance) -> String {
    let tally = &advice.request_tally;
    let mut notes = Vec::new();
    if tally.replayed_refusals > 0 {
        notes.push(format!(
            "The times of refused requests are not recorded: they are spread over the time of their day in which the most \
             leases of the share were held, with the median length of granted requests. Repeated requests count again, \
             at most {MOST_REFUSALS} a day."
        ));
    }
    if advice.replayed() > 0 {
        notes.push(
            "In the replay, no request waits, and each takes the share that it named or got. Each request counts once, \
             whatever its length."
                .to_owned(),
        );
    }
    let met = advice.refused_but_met_today();
    if met > 0 {
        notes.push(format!(
            "Today's layouts meet at least {met} of the refused requests in the replay, but refused them in fact: the \
             replay is more favorable than the host was."
        ));
    }
    if tally.other_grants > 0 || tally.other_refusals > 0 {
        notes.push(format!(
            "Not replayed: {} granted and {} refused requests for other shares, without a profile, or without a known \
             length.",
            tally.other_grants, tally.other_refusals
        ));
    }
    if !advice.left_out.is_empty() {
        let gpus = gpu_numbers(&advice.left_out);
        notes.push(format!("Left out, because only fixed layouts of MIG devices and whole GPUs are compared: {gpus}."));
    }
    notes.iter().map(|note| remark(note, look)).collect()
}

#[cfg(test)]
pub(crate) mod tests;
