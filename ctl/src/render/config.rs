//! The active config, as tables.

use gpush_api::{ApiError, ConfigView, Gpu, GpuIndex, GpuPlan, PendingRestart, Plans, RuleView};
use gpush_core::isolation;

use super::{
    Appearance,
    appearance::{BAD, NEW, NOTE, QUIET, STRONG, count, paint},
    names::gpu_numbers,
    policy,
    table::{Align, table},
    trouble,
};

/// Draws `gpushctl config show`.
pub(crate) fn config(view: &ConfigView, look: &Appearance) -> String {
    let mut out = match &view.path {
        Some(path) => format!("{}\n", paint(STRONG, &look.clean(path))),
        None => paint(NOTE, "no config file: gpushd uses its defaults, and no rule claims a GPU") + "\n",
    };
    if let Some(trouble) = &view.trouble {
        out += &not_loaded(trouble, look);
    }
    if !view.rules.is_empty() {
        out.push('\n');
        out += &rules(&view.rules, look);
    }
    if !view.layouts.is_empty() {
        out.push('\n');
        let rows = view.layouts.iter().map(|l| vec![look.clean(&l.name), look.clean(&l.entries.join(", "))]).collect();
        out += &table(&[("LAYOUT", Align::Left), ("INSTANCES", Align::Left)], rows, 0, look);
    }
    if !view.pending_restart.is_empty() {
        out.push('\n');
        out += &pending(&view.pending_restart, look);
    }
    out
}

/// Draws why the config file on disk is not active.
pub(crate) fn not_loaded(trouble: &ApiError, look: &Appearance) -> String {
    trouble::lines("config not loaded", trouble, 0, look).join("\n") + "\n"
}

/// Draws the settings in the file that take effect only after a restart.
fn pending(settings: &[PendingRestart], look: &Appearance) -> String {
    let heading =
        format!("{} for a restart of gpushd:", if settings.len() == 1 { "One setting waits" } else { "Settings wait" });
    let value = |value: &Option<String>| value.as_ref().map_or_else(|| "not set".to_owned(), |text| look.clean(text));
    let rows = settings.iter().map(|s| vec![look.clean(&s.key), value(&s.in_force), value(&s.in_file)]).collect();
    let columns = [("SETTING", Align::Left), ("IN FORCE", Align::Left), ("IN THE FILE", Align::Left)];
    format!("{}\n{}", paint(NOTE, &heading), table(&columns, rows, 0, look))
}

/// Draws the rules in their order, each with the GPUs that it claims.
pub(crate) fn rules(rules: &[RuleView], look: &Appearance) -> String {
    let columns = [
        ("RULE", Align::Left),
        ("GPUS", Align::Left),
        ("MODE", Align::Left),
        ("LAYOUT", Align::Left),
        ("CLAIMS", Align::Left),
    ];
    let rows = rules
        .iter()
        .map(|rule| {
            let claims = if rule.claims.is_empty() { "no GPU".to_owned() } else { gpu_numbers(&rule.claims) };
            vec![
                look.clean(&rule.name),
                look.clean(&rule.selectors.join(", ")),
                rule.mode.name().to_owned(),
                rule.layout.as_ref().map_or_else(|| "-".to_owned(), |l| look.clean(&l.join(", "))),
                claims,
            ]
        })
        .collect();
    let table = table(&columns, rows, 0, look);
    match policy::of_rules(rules, look) + &access(rules, look) {
        more if more.is_empty() => table,
        more => format!("{table}\n{more}"),
    }
}

/// Says who may lease the GPUs of each rule that does not permit all users.
fn access(rules: &[RuleView], look: &Appearance) -> String {
    let lines = rules.iter().filter_map(|rule| Some((rule, rule.access.as_ref()?))).flat_map(|(rule, access)| {
        look.wrap(&format!("{}  leases for ", look.clean(&rule.name)), &look.clean(&access.to_string()))
    });
    lines.map(|line| paint(QUIET, &line) + "\n").collect()
}

/// Returns whether a plan is about a MIG layout, not about a GPU that is shared as a whole.
fn is_cut(plan: &GpuPlan) -> bool {
    plan.layout.iter().any(|entry| entry != "none")
}

/// Draws what each rule isolates, one line for each rule.
fn isolation(view: &ConfigView, look: &Appearance) -> String {
    let lines = view.rules.iter().flat_map(|rule| {
        let first = format!("{}: ", look.clean(&rule.name));
        look.wrap(&first, &isolation::sentence(view, rule))
    });
    let text: String = lines.map(|line| paint(QUIET, &line) + "\n").collect();
    if text.is_empty() { text } else { format!("\n{text}") }
}

/// Draws `gpushctl config check` for a valid file. `gpus` are the GPUs of the offline host, if one
/// was given.
pub(crate) fn checked(
    view: &ConfigView,
    findings: &[String],
    plans: Option<&Plans>,
    gpus: &[Gpu],
    look: &Appearance,
) -> String {
    let path = view.path.as_deref().unwrap_or_default();
    let (rules_in, layouts) = (count(view.rules.len(), "rule"), count(view.layouts.len(), "layout"));
    let is_refused = plans.is_some_and(|plans| plans.plans.iter().any(|plan| plan.error.is_some()));
    let verdict = if is_refused { paint(BAD, "a layout is impossible") } else { paint(NEW, "no errors") };
    let mut out = format!("{}: {verdict}, {rules_in}, {layouts}\n", look.clean(path));
    let remarks = || {
        let lines = findings.iter().flat_map(|finding| look.wrap("! ", &look.clean(finding)));
        lines.map(|line| paint(NOTE, &line) + "\n").collect::<String>()
    };
    if gpus.is_empty() {
        return out + &isolation(view, look) + &remarks();
    }
    if !view.rules.is_empty() {
        out.push('\n');
        out += &rules(&view.rules, look);
    }
    out += &isolation(view, look);
    let free: Vec<GpuIndex> =
        gpus.iter().map(|g| g.index).filter(|index| !view.rules.iter().any(|r| r.claims.contains(index))).collect();
    if !free.is_empty() {
        out += &format!("{}\n", paint(QUIET, &format!("without a rule: {}", gpu_numbers(&free))));
    }
    out += &remarks();
    if let Some(plans) = plans {
        out.push('\n');
        let fits: Vec<GpuIndex> = plans
            .plans
            .iter()
            .filter(|p| p.refusal.is_none() && p.error.is_none() && is_cut(p))
            .map(|p| p.gpu)
            .collect();
        if !fits.is_empty() {
            out += &format!("{}: the layout fits\n", gpu_numbers(&fits));
        }
        let errors = plans.plans.iter().filter_map(|plan| plan.error.as_ref());
        for line in trouble::of_gpus("refused", errors, 0, look) {
            out += &(line + "\n");
        }
    }
    out
}
