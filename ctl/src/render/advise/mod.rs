//! Draws the output of `gpushctl advise`.

pub(crate) mod queueing;
pub(crate) mod recorded_use;

use gpush_advice::{Advice, Leaf, ModelAdvice, Packing, Resource};

use super::{
    Appearance,
    appearance::{IDLE, NOTE, QUIET, STRONG, count, paint, product},
    names::gpu_numbers,
    slices::{self, Cell},
};

/// Width of the labels on the left, with the blanks around them.
const LABEL: usize = 13;

/// Lines with labels on the left. A label that is the same as that of the line above is left out.
struct Labelled<'l> {
    out: String,
    last: &'static str,
    look: &'l Appearance,
}

impl Labelled<'_> {
    fn add(&mut self, label: &'static str, text: &str) {
        let shown = if self.last == label { "" } else { label };
        let first = format!("  {shown:<width$}", width = LABEL - 2);
        for line in self.look.wrap(&first, text) {
            self.out += &(line + "\n");
        }
        self.last = label;
    }
}

/// Draws `gpushctl advise`. `host` is the offline host, if the user named one.
pub(crate) fn advice(advice: &Advice, host: Option<&str>, look: &Appearance) -> String {
    let mut out = String::new();
    let mut explained: Vec<(Leaf, String)> = Vec::new();
    for model in &advice.models {
        let before = explained.iter().find(|(leaf, _)| Some(*leaf) == model.advised).map(|(_, gpus)| gpus.as_str());
        out += &of_model(model, before, look);
        out.push('\n');
        if let (Some(leaf), None) = (model.advised, before) {
            explained.push((leaf, gpu_numbers(&model.gpus)));
        }
    }
    let places = match advice.places {
        places if places >= advice.tenants => format!("{} at a time", count_of(places, "place")),
        places => format!("{} at a time: {} wait for a lease", count_of(places, "place"), advice.tenants - places),
    };
    out += &look.wrap("", &format!("{}, {places}.", count_of(advice.tenants, "tenant"))).join("\n");
    out += "\n\nConfig lines:\n\n";
    out += &advice.text;
    let offline = host.filter(|host| *host != "-").map_or_else(String::new, |host| format!(" --offline {host}"));
    let next = format!("Check them in a file with `gpushctl config check FILE{}`.", look.clean(&offline));
    out += &format!("\n{}\n", look.wrap("", &next).join("\n"));
    out
}

fn count_of(number: u32, one: &str) -> String {
    count(usize::try_from(number).unwrap_or(usize::MAX), one)
}

/// Draws the answer for one model. `before` are GPUs of another model with the same answer, which are drawn above.
fn of_model(model: &ModelAdvice, before: Option<&str>, look: &Appearance) -> String {
    let heading = format!("{}: {} x {}", gpu_numbers(&model.gpus), model.gpus.len(), look.clean(product(&model.name)));
    let mut lines = Labelled { out: paint(STRONG, &heading) + "\n", last: "", look };
    match model.advised {
        Some(leaf) => {
            let layout =
                if model.entries.is_empty() { String::new() } else { format!(": {}", model.entries.join(", ")) };
            let tenants = count_of(model.tenants_per_gpu, "tenant");
            lines.add("advice", &format!("{}, {tenants} on each GPU{layout}", leaf.name()));
        }
        None => lines.add("advice", "not for these tenants"),
    }
    if !model.also_fits.is_empty() {
        let also = format!("{}; instances of different sizes fit on one GPU", model.also_fits.join(", "));
        lines.add("also fits", &also);
    }
    if !model.placed.is_empty() {
        for line in picture(model, look) {
            lines.out += &(line + "\n");
        }
    }
    let reasons: Vec<&str> = model.reasons.iter().map(|step| step.text).collect();
    lines.add("because", &reasons.join("; "));
    for line in packing_lines(&model.packing) {
        lines.add("packing", &line);
    }
    for note in &model.notes {
        lines.add("note", note);
    }
    if let Some(before) = before {
        lines.add("accepted", &format!("as for {before}"));
        return lines.out;
    }
    if let Some(trade_off) = model.trade_off {
        lines.add("accepted", trade_off);
    }
    if let Some(limits) = model.limits {
        lines.add("limits", limits);
    }
    for neighbour in model.advised.iter().flat_map(|leaf| leaf.neighbours()) {
        lines.add("not", &format!("{}: {}", neighbour.name, neighbour.why));
    }
    lines.out
}

/// Draws the layout of one GPU. Instances that fit in addition have another color.
fn picture(model: &ModelAdvice, look: &Appearance) -> Vec<String> {
    let mut also = model.also_fits.clone();
    let cells = model.placed.iter().rev().map(|instance| {
        let spare = also.iter().position(|profile| *profile == instance.profile);
        let style = if spare.map(|at| also.remove(at)).is_some() { QUIET } else { IDLE };
        let mark = if style == QUIET { "+" } else { look.pick("○", "o") };
        Cell::of(&instance.profile, instance.placement, mark, None, style)
    });
    slices::draw(cells.collect(), model.memory_slices, slices::FREE, 2, look)
}

/// Returns the packing bound as clauses; none without a known demand.
pub(crate) fn packing_lines(packing: &Packing) -> Vec<String> {
    let (Some(most), Some(binds)) = (packing.most_tenants, packing.binds) else { return Vec::new() };
    let admits: Vec<String> = [("memory", packing.memory_admits), ("compute", packing.compute_admits)]
        .into_iter()
        .filter_map(|(resource, admits)| Some(format!("{resource} admits {}", admits?)))
        .collect();
    let binds = match binds {
        Resource::Memory => "memory",
        Resource::Compute => "compute",
    };
    let busy =
        packing.utilization_percent.map_or_else(String::new, |percent| format!(", at most {percent} % utilized"));
    let mut lines = vec![format!("{}: {binds} binds, {} on a GPU{busy}", admits.join(", "), count_of(most, "tenant"))];
    for one in &packing.mechanisms {
        lines.push(format!("{}: {}, {}", one.mechanism, count_of(one.tenants, "tenant"), one.remark));
    }
    lines
}

/// Draws a remark that is not a result.
fn remark(text: &str, look: &Appearance) -> String {
    look.wrap("", text).iter().map(|line| paint(NOTE, line) + "\n").collect()
}

#[cfg(test)]
mod tests;
