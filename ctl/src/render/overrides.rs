//! Overrides, and what a reload of the config changes.

use gpush_api::{
    ConfigDiff, DesiredView, Gpu, GpuDiff, GpuIndex, LeaseTerms, Mode, Operation, Override, OverrideEnded, Overrides,
    Reloaded, SettingDiff,
};

use super::{
    Appearance,
    appearance::{BAD, NEW, NOTE, QUIET, STRONG, pad, paint},
    listing::{Listing, widened},
    names,
    names::gpu_numbers,
    policy,
    table::{Align, Narrow, table},
    trouble,
};

/// Describes an override: `by alice 2h ago: big run, expires in 3h`.
fn sentence(one: &Override, look: &Appearance) -> String {
    let expires = one.expires_at.map_or_else(String::new, |at| format!(", expires {}", look.ahead(at)));
    of(one, look) + &expires
}

/// Describes an override without its expiry, because the override may already have ended.
fn of(one: &Override, look: &Appearance) -> String {
    let by = names::actor(&one.by, look);
    let reason = if one.reason.is_empty() { String::new() } else { format!(": {}", look.clean(&one.reason)) };
    format!("by {by} {}{reason}", look.ago(one.created_at))
}

/// Returns the index of the override's GPU; the UUID if the driver does not list the GPU.
fn number(one: &Override, look: &Appearance) -> String {
    one.gpu.map_or_else(|| look.clean(one.gpu_uuid.as_str()), |index| index.to_string())
}

/// Lists the overrides of `gpushctl config overrides`.
pub(crate) fn list(all: &Overrides, look: &Appearance) -> Listing {
    let columns = [
        ("GPU", Align::Left),
        ("LAYOUT", Align::Left),
        ("IN PLACE OF", Align::Left),
        ("BY", Align::Left),
        ("MADE", Align::Left),
        ("EXPIRES", Align::Left),
        ("REASON", Align::Left),
    ];
    let row = |one: &Override| {
        let dash = || "-".to_owned();
        vec![
            number(one, look),
            look.clean(&one.layout.join(", ")),
            one.rule.as_ref().map_or_else(dash, |rule| look.clean(rule)),
            names::actor(&one.by, look),
            look.ago(one.created_at),
            one.expires_at.map_or_else(dash, |at| look.ahead(at)),
            if one.reason.is_empty() { dash() } else { look.clean(&one.reason) },
        ]
    };
    let rows = all.overrides.iter().map(row).collect();
    let (columns, rows) = widened(
        &columns,
        rows,
        &all.overrides,
        &[
            ("MADE AT", &|one| look.clock(one.created_at)),
            ("EXPIRES AT", &|one| one.expires_at.map_or_else(|| "-".to_owned(), |at| look.clock(at))),
            ("UUID", &|one| look.clean(one.gpu_uuid.as_str())),
        ],
        look,
    );
    Listing::new(&columns, rows, Narrow::default().prose(), look)
        .names(all.overrides.iter().map(|one| number(one, look)))
        .uuids(all.overrides.iter().map(|one| one.gpu_uuid.clone()))
        .or_empty("No override is active: the rules of the config decide every layout.")
}

/// Draws the result of `gpushctl config overrides clear`. `now` is the GPU without the override, if it is known.
pub(crate) fn ended(ended: &OverrideEnded, now: Option<&Gpu>, look: &Appearance) -> String {
    let one = &ended.ended;
    let which = one.gpu.map_or_else(|| look.clean(one.gpu_uuid.as_str()), |index| gpu_numbers(&[index]));
    let text = format!("{which}: cleared the override {}", of(one, look));
    let mut out = look.wrap("", &text).join("\n") + "\n";
    let apply = one.gpu.map_or_else(|| "gpushctl apply".to_owned(), |index| format!("gpushctl apply {index}"));
    let matches = now.is_some_and(|gpu| gpu.drift.is_empty() && !gpu.stale);
    let next = &if matches {
        "The instances are unchanged, and match the config.".to_owned()
    } else {
        format!("The instances are unchanged; `{apply}` applies the config.")
    };
    out += &(look.wrap("", next).join("\n") + "\n");
    out
}

/// Draws the result of `gpushctl config reload`.
pub(crate) fn reloaded(reloaded: &Reloaded, look: &Appearance) -> String {
    let mut out = loaded(reloaded, look);
    if reloaded.gpus.is_empty() {
        return out;
    }
    let wants = |one: &&GpuDiff| {
        let differs = !one.drift.is_empty() || !one.pending.is_empty() || !one.drift_known;
        differs && one.in_file.as_ref().is_some_and(|wanted| wanted.mode.is_managed())
    };
    // Name the GPUs in the command: without names, `apply` leaves some of them out.
    let those: Vec<String> = reloaded.gpus.iter().filter(wants).map(|one| one.gpu.to_string()).collect();
    let how = match those.as_slice() {
        [] => ".".to_owned(),
        those => format!("; `gpushctl apply {}` applies the new rules.", those.join(",")),
    };
    out += &format!(
        "\n{}\n",
        look.wrap("", &format!("A reload changes layouts and modes only with `auto_reconcile`{how}")).join("\n")
    );
    out
}

/// Draws the config that gpushd has loaded: what differs from the previous config, and what happens to MPS daemons.
pub(crate) fn loaded(reloaded: &Reloaded, look: &Appearance) -> String {
    let file = reloaded.path.as_ref().map_or_else(|| "no config file".to_owned(), |path| look.clean(path));
    let mut out = format!("{file}: {}\n", paint(NEW, "loaded"));
    for finding in &reloaded.findings {
        let lines = look.wrap("! ", &look.clean(finding));
        out += &lines.iter().map(|line| paint(NOTE, line) + "\n").collect::<String>();
    }
    if reloaded.settings.is_empty() && reloaded.gpus.is_empty() && reloaded.ended.is_empty() {
        return out + "No change.\n";
    }
    out += &settings(&reloaded.settings, "BEFORE", "NOW", look);
    let changed = |one: &GpuDiff| block(one, &[("before", Some(&one.in_force)), ("now", one.in_file.as_ref())], look);
    out += &blocks(&reloaded.gpus.iter().collect::<Vec<_>>(), changed);
    if !reloaded.ended.is_empty() {
        out.push('\n');
    }
    for one in &reloaded.ended {
        let which = one.gpu.map_or_else(|| look.clean(one.gpu_uuid.as_str()), |index| gpu_numbers(&[index]));
        out += &(look.wrap("", &format!("{which}: ended the override {}", of(one, look))).join("\n") + "\n");
    }
    if let Some(text) = daemons(&reloaded.gpus) {
        out += &format!("\n{}\n", look.wrap("", &text).join("\n"));
    }
    out
}

/// Says what gpushd does with the MPS daemons of GPUs whose MPS settings a reload changed; `None` if there are none.
fn daemons(gpus: &[GpuDiff]) -> Option<String> {
    // If the mode changes too, or leases delay the change, the daemons change later.
    let is_now = |one: &&GpuDiff| {
        one.pending.is_empty() && one.in_file.as_ref().is_some_and(|file| file.mode == one.in_force.mode)
    };
    let mps = |one: &GpuDiff| Some((one.in_force.mps.as_ref()?.clone(), one.in_file.as_ref()?.mps.as_ref()?.clone()));
    let changed: Vec<(GpuIndex, bool)> = gpus
        .iter()
        .filter(is_now)
        .filter_map(|one| mps(one).map(|(before, now)| (one.gpu, before, now)))
        .filter(|(_, before, now)| before != now)
        .map(|(gpu, before, now)| (gpu, before.users != now.users))
        .collect();
    if changed.is_empty() {
        return None;
    }
    let all: Vec<GpuIndex> = changed.iter().map(|(gpu, _)| *gpu).collect();
    let restarts: Vec<GpuIndex> = changed.iter().filter(|(_, users)| *users).map(|(gpu, _)| *gpu).collect();
    let mut text = format!(
        "Running MPS daemons of {} get the new settings now; clients that already run keep theirs.",
        gpu_numbers(&all)
    );
    if !restarts.is_empty() {
        let those = gpu_numbers(&restarts);
        text += &format!(
            " `users` takes effect with a restart: gpushd restarts the daemons of {those} when they have no lease and no client."
        );
    }
    Some(text)
}

/// Returns whether there is a difference to show.
pub(crate) fn differs(diff: &ConfigDiff) -> bool {
    diff.trouble.is_some() || !diff.settings.is_empty() || diff.gpus.iter().any(is_other)
}

/// Returns whether a GPU has a difference: its config in the file is not the active one, it has an override, or its
/// layout drifts.
fn is_other(one: &GpuDiff) -> bool {
    one.overridden.is_some()
        || !one.drift.is_empty()
        || !one.pending.is_empty()
        || one.in_file.as_ref().is_some_and(|file| *file != one.in_force)
}

/// Draws `gpushctl config diff`.
pub(crate) fn diff(diff: &ConfigDiff, look: &Appearance) -> String {
    let file = diff.path.as_ref().map_or_else(|| "no config file".to_owned(), |path| look.clean(path));
    if !differs(diff) && diff.unseen.is_empty() {
        return format!("{file}: same as the config in use; the GPUs are as desired\n");
    }
    let mut out = format!("{}\n", paint(STRONG, &file));
    if let Some(trouble) = &diff.trouble {
        let lines = trouble::lines("refused", trouble, 0, look);
        out += &(lines.join("\n") + "\n");
    }
    out += &settings(&diff.settings, "IN USE", "IN THE FILE", look);
    let differing = |one: &GpuDiff| {
        let in_file = one.in_file.as_ref().filter(|file| **file != one.in_force);
        match in_file {
            Some(file) => block(one, &[("in the file", Some(file)), ("in use", Some(&one.in_force))], look),
            None => block(one, &[("in use", Some(&one.in_force))], look),
        }
    };
    out += &blocks(&diff.gpus.iter().filter(|one| is_other(one)).collect::<Vec<_>>(), differing);
    for unseen in &diff.unseen {
        out += &format!("\n{}\n", trouble::lines("!", unseen, 0, look).join("\n"));
    }
    let is_same = |one: &&GpuDiff| !is_other(one) && one.drift_known;
    let same: Vec<GpuIndex> = diff.gpus.iter().filter(is_same).map(|one| one.gpu).collect();
    if !same.is_empty() {
        let verb = if same.len() == 1 { "matches" } else { "match" };
        let file_is_read = diff.gpus.iter().any(|one| one.in_file.is_some());
        let what = if file_is_read { "the file and the config in use" } else { "the config in use" };
        let text = format!("{} {verb} {what}", gpu_numbers(&same));
        out += &format!("\n{}\n", paint(QUIET, &text));
    }
    out
}

fn settings(settings: &[SettingDiff], before: &str, after: &str, look: &Appearance) -> String {
    if settings.is_empty() {
        return String::new();
    }
    let value = |value: &Option<String>| value.as_ref().map_or_else(|| "not set".to_owned(), |text| look.clean(text));
    let row = |one: &SettingDiff| {
        let when = match one.key.as_str() {
            _ if one.restart => "with the next start of gpushd",
            // Running daemons keep their program and their log directory.
            "mps.control" | "mps.log_directory" => "with the next start of each daemon",
            _ => "at once",
        };
        vec![look.clean(&one.key), value(&one.in_force), value(&one.in_file), when.to_owned()]
    };
    let columns =
        [("SETTING", Align::Left), (before, Align::Left), (after, Align::Left), ("TAKES EFFECT", Align::Left)];
    format!("\n{}", table(&columns, settings.iter().map(row).collect(), 0, look))
}

/// Draws a block for each GPU. GPUs whose blocks differ only in the GPU are drawn once.
fn blocks(gpus: &[&GpuDiff], block: impl Fn(&GpuDiff) -> String) -> String {
    let mut drawn: Vec<(Vec<GpuIndex>, String)> = Vec::new();
    for one in gpus {
        let block = block(one);
        match drawn.iter_mut().find(|(_, known)| *known == block) {
            Some((same, _)) => same.push(one.gpu),
            None => drawn.push((vec![one.gpu], block)),
        }
    }
    drawn.into_iter().map(|(gpus, block)| format!("\n{}\n{block}", paint(STRONG, &gpu_numbers(&gpus)))).collect()
}

/// Draws the desired layouts of a GPU, where each comes from, and the current layout.
fn block(one: &GpuDiff, wanted: &[(&str, Option<&DesiredView>)], look: &Appearance) -> String {
    let mut out = String::new();
    let mut line = |name: &str, text: &str| {
        let first = format!("  {}", pad(name, 13));
        for line in look.wrap(&first, text) {
            out += &match line.strip_prefix(&first) {
                Some(rest) => format!("{}{rest}\n", paint(QUIET, &first)),
                None => format!("{line}\n"),
            };
        }
    };
    for (name, view) in wanted.iter().filter_map(|(name, view)| Some((name, (*view)?))) {
        line(name, &wish(view, look));
    }
    if let Some(over) = &one.overridden {
        line("override", &format!("{} {}", look.clean(&over.layout.join(", ")), sentence(over, look)));
    }
    let stands = match &one.stands {
        Some(instances) if instances.is_empty() => "no instance".to_owned(),
        Some(instances) => look.clean(&instances.join(", ")),
        None => "whole GPU, no MIG".to_owned(),
    };
    line("present", &stands);
    for change in one.pending.iter().filter(|change| !change.leases.is_empty()) {
        for line in look.wrap("  * pending: ", &look.clean(&change.describe(one.gpu))) {
            out += &format!("{}\n", paint(NOTE, &line));
        }
    }
    for drift in &one.drift {
        for line in look.wrap("  ! drift: ", &look.clean(drift)) {
            out += &format!("{}\n", paint(NOTE, &line));
        }
    }
    out
}

fn wish(view: &DesiredView, look: &Appearance) -> String {
    let Some(rule) = view.rule.as_ref().map(|rule| look.clean(rule)) else { return "no rule".to_owned() };
    let layout =
        view.layout.as_ref().map_or_else(String::new, |layout| format!(": {}", look.clean(&layout.join(", "))));
    let shared = policy::describe(view.mps.as_ref(), view.timeslice.as_ref());
    let shared = shared.map_or_else(String::new, |words| format!("; {words}"));
    let leases = view.lease.map_or_else(String::new, terms);
    let access = view
        .access
        .as_ref()
        .map_or_else(String::new, |access| format!("; leases for {}", look.clean(&access.to_string())));
    format!("{} ({rule}){layout}{shared}{leases}{access}", view.mode.name())
}

/// Describes the settings of a rule for leases. Leaves out settings that have their default values.
fn terms(terms: LeaseTerms) -> String {
    let usual = LeaseTerms::default();
    let mut words = Vec::new();
    if let Some(requirement) = terms.requirement {
        words.push(format!("lease {}", requirement.name()));
    }
    if terms.at_end != usual.at_end {
        words.push(format!("at_end {}", terms.at_end.name()));
    }
    if terms.owner != usual.owner {
        words.push(format!("owner {}", terms.owner.name()));
    }
    words.into_iter().map(|word| format!("; {word}")).collect()
}

/// Describes how an operation that has just ended has changed overrides. Compares the GPUs before and after it.
pub(crate) fn override_results(operation: &Operation, before: &[Gpu], now: &[Gpu], look: &Appearance) -> Vec<String> {
    let mut out = Vec::new();
    let on = |gpus: &[Gpu], uuid: &str| gpus.iter().find(|gpu| gpu.uuid == uuid)?.overridden.clone();
    for plan in &operation.plans {
        let number = gpu_numbers(&[plan.gpu]);
        let text = match (on(before, plan.gpu_uuid.as_str()), on(now, plan.gpu_uuid.as_str())) {
            (_, Some(one)) if is_new(&one, operation, before, plan.gpu_uuid.as_str()) => {
                let until =
                    one.expires_at.map_or_else(String::new, |at| format!(" until it expires {}", look.ahead(at)));
                let clear = format!("`gpushctl config overrides clear {}` (administrator) removes it", plan.gpu);
                let layout = look.clean(&one.layout.join(", "));
                format!("{number}: override active{until}, layout {layout}; {clear}")
            }
            (Some(one), None) => format!("{number}: cleared the override {}", self::of(&one, look)),
            // The user has applied the layout with `--once`.
            (None, None) if drifts(now, plan.gpu_uuid.as_str()) && !plan.waits_for_reboot() => format!(
                "{number}: the layout differs from the config, and no override was made: gpushd applies the config \
                 after a reboot, or within about a minute if `auto_reconcile` is set; `gpushctl apply {}` applies it now",
                plan.gpu
            ),
            (_, Some(_)) | (None, None) => continue,
        };
        out.extend(look.wrap("", &text).iter().map(|line| paint(NOTE, line)));
    }
    out
}

/// Returns whether the operation has set the override. If the GPU was read before, compares generations. Otherwise
/// compares times, which have a precision of only one second.
fn is_new(one: &Override, operation: &Operation, before: &[Gpu], uuid: &str) -> bool {
    match before.iter().find(|gpu| gpu.uuid == uuid) {
        Some(gpu) => gpu.overridden.as_ref().is_none_or(|earlier| earlier.generation != one.generation),
        None => one.created_at >= operation.created_at,
    }
}

/// Returns whether the layout of a GPU differs from its rule.
fn drifts(gpus: &[Gpu], uuid: &str) -> bool {
    gpus.iter().any(|gpu| gpu.uuid == uuid && gpu.mode == Mode::Mig && !gpu.drift.is_empty())
}

/// Returns the note about an override that is shown below its GPU, with its style.
pub(crate) fn note(one: &Gpu, look: &Appearance) -> Option<(anstyle::Style, String)> {
    let over = one.overridden.as_ref()?;
    let text = format!("override {}", sentence(over, look));
    Some(match one.mode {
        Mode::Mig => (NOTE, text),
        _ => (BAD, format!("{text}; it has no effect: no rule of mode `mig` claims this GPU")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: a reload that changed the rule of eight GPUs printed eight equal blocks.
    #[test]
    fn equal_blocks_are_drawn_once() {
        let in_force = DesiredView {
            rule: None,
            mode: Mode::NoRule,
            layout: None,
            mps: None,
            timeslice: None,
            lease: None,
            access: None,
        };
        let diff = |index: u32| GpuDiff {
            gpu: GpuIndex(index),
            gpu_uuid: format!("GPU-{index}").into(),
            in_file: None,
            in_force: in_force.clone(),
            overridden: None,
            stands: None,
            drift: Vec::new(),
            pending: Vec::new(),
            drift_known: true,
        };
        let all: Vec<GpuDiff> = (0..4).map(diff).collect();
        let all: Vec<&GpuDiff> = all.iter().collect();
        let text = blocks(&all, |one| if one.gpu == GpuIndex(2) { "  b\n".to_owned() } else { "  a\n".to_owned() });
        assert!(text.contains("GPUs 0-1, 3") && text.matches("  a\n").count() == 1, "{text}");
        assert!(text.ends_with("  b\n"), "{text}");
    }
}
