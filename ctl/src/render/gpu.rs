//! One GPU in `gpushctl status`: heading, slices, one line per instance, and notes.
//!
//! ```text
//! GPU 0  A100-SXM4-80GB  07:00.0  mig (training)                     12.3/80.0 GiB
//!   ╭──── slices ────╮
//!   ● 3g.40gb@0  GI 2 CI 0  ━━━━╸───   12.1/ 39.5 GiB  alice 4123 python train.py
//!   ! 2 things are not as the config wants them
//! ```

use gpush_api::{Gpu, GpuIndex, GpuState, Mode};

pub(crate) use super::device_rows::{Columns, INDENT, Row, Users, rows};
use super::{
    Appearance,
    appearance::{PLAIN, QUIET, STRONG, gib, paint, pci, product, width},
    device_rows::{accepts_work, row},
    gpu_notes,
    lease::below as lease,
    mps::{list as mps, of_how_many},
    names::{gpu_numbers, state},
    slices::{self, Use},
    timeslice,
};

/// Returns how a GPU is shared, for its heading: `mig (training)`.
fn sharing(gpu: &Gpu, look: &Appearance) -> String {
    match &gpu.rule {
        Some(rule) => format!("{} ({})", gpu.mode.name(), look.clean(rule)),
        None => gpu.mode.name().to_owned(),
    }
}

/// Returns a text which says that none of these GPUs is shared in the way `way`, such as `time-sliced`. The text also
/// names the modes of the GPUs.
pub(crate) fn of_other_modes(gpus: &[Gpu], way: &str) -> String {
    let mut modes: Vec<(Mode, Vec<GpuIndex>)> = Vec::new();
    for gpu in gpus {
        match modes.iter_mut().find(|(mode, _)| *mode == gpu.mode) {
            Some((_, indexes)) => indexes.push(gpu.index),
            None => modes.push((gpu.mode, vec![gpu.index])),
        }
    }
    let sentence = |(mode, indexes): &(Mode, Vec<GpuIndex>)| {
        let (are, their, them) = if indexes.len() == 1 { ("is", "its", "it") } else { ("are", "their", "them") };
        let why = match mode {
            Mode::NoRule => format!("no rule of the config claims {them}"),
            other => format!("{their} mode is `{}`", other.name()),
        };
        format!("{} {are} not {way}: {why}.", gpu_numbers(indexes))
    };
    modes.iter().map(sentence).collect::<Vec<_>>().join(" ")
}

/// Formats the memory in use and the total memory of a GPU.
fn memory(gpu: &Gpu) -> String {
    format!("{}/{} GiB", gib(gpu.memory.used_mib), gib(gpu.memory.total_mib))
}

/// Draws the heading of a GPU: its name on the left, its memory on the right. `others` are the GPUs that are drawn
/// together with it. If the indexes of all these GPUs do not fit into the heading, they are on a line above the
/// heading.
pub(crate) fn heading(gpu: &Gpu, others: &[&Gpu], look: &Appearance) -> String {
    heading_with(gpu, others, "", look)
}

/// Returns how a GPU is used, for `--brief`.
pub(crate) fn usage(gpu: &Gpu, users: &Users<'_>) -> String {
    if let Some(daemon) = users.daemons.iter().find(|daemon| daemon.device.is_none()) {
        // If the GPU accepts no new work, the heading already shows its state.
        let is_reserved = accepts_work(gpu) && !slices::admits_leases(daemon);
        let reserved = if is_reserved { "reserved, " } else { "" };
        return format!("{reserved}{} clients", of_how_many(daemon));
    }
    if gpu.state == GpuState::Lost {
        return String::new();
    }
    let Some(mig) = gpu.mig.as_ref().filter(|mig| mig.enabled) else {
        return Use::of_gpu(gpu, &users.daemons).word().to_owned();
    };
    let uses: Vec<Use> = mig.instances.iter().map(|instance| Use::of(instance, &users.devices)).collect();
    let number = |wanted: Use| uses.iter().filter(|one| **one == wanted).count();
    // If the GPU accepts no new work, its state shows that all its idle instances are reserved.
    let others = [(Use::Granted, true), (Use::Reserved, accepts_work(gpu))];
    let others = others.iter().filter(|(one, shown)| *shown && number(*one) > 0);
    let others: String = others.map(|(one, _)| format!(", {} {}", number(*one), one.word())).collect();
    if uses.is_empty() {
        "no instance".to_owned()
    } else {
        format!("{}/{} in use{others}", number(Use::Busy), uses.len())
    }
}

/// Draws a heading. `usage` is shown before the memory.
fn heading_with(gpu: &Gpu, others: &[&Gpu], usage: &str, look: &Appearance) -> String {
    let indexes: Vec<GpuIndex> = std::iter::once(gpu.index).chain(others.iter().map(|other| other.index)).collect();
    let mut number = gpu_numbers(&indexes);
    let (state_word, state_style) = state(gpu.state);
    let state_word = if gpu.state == GpuState::Ready { "" } else { state_word };
    let right = if gpu.memory.total_mib == 0 || others.iter().any(|other| memory(other) != memory(gpu)) {
        // Show no memory: the GPU is lost and reports none, or the GPUs that are drawn together have different amounts.
        String::new()
    } else {
        memory(gpu) + if others.is_empty() { "" } else { " each" }
    };
    let right = [usage, right.as_str()].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("  ");
    let mut sharing = sharing(gpu, look);
    let mut right = right;
    let mut name = look.clean(product(&gpu.name));
    let mut address = if others.is_empty() { look.clean(pci(&gpu.pci)) } else { String::new() };

    let gap = |text: &str| if text.is_empty() { 0 } else { width(text) + 2 };
    let rest = gap(&name) + gap(&address) + gap(&sharing) + gap(state_word) + 2 + width(&right);
    let mut above = String::new();
    if look.wraps && !others.is_empty() && width(&number) + rest > look.width {
        let numbers = look.wrap("", &std::mem::take(&mut number));
        above = numbers.iter().map(|line| paint(STRONG, line) + "\n").collect();
    }
    let columns = |name: &str, address: &str, sharing: &str, right: &str| {
        width(&number) + gap(name) + gap(address) + gap(sharing) + gap(state_word) + 2 + width(right)
    };
    // If the heading is too wide, first shorten the product name. Then leave out the PCI address, the rule, and the
    // memory or the use. `gpu show` prints all of them.
    let over = columns(&name, &address, &sharing, &right).saturating_sub(look.width);
    if over > 0 {
        name = look.fit(&name, width(&name).saturating_sub(over).max(16));
    }
    if columns(&name, &address, &sharing, &right) > look.width {
        address.clear();
    }
    if look.wraps && columns(&name, &address, &sharing, &right) > look.width {
        gpu.mode.name().clone_into(&mut sharing);
    }
    if look.wraps && columns(&name, &address, &sharing, &right) > look.width && !usage.is_empty() {
        usage.clone_into(&mut right);
    }
    let fill = slices::edge(INDENT, look).saturating_sub(columns(&name, &address, &sharing, &right)) + 2;
    let quiet = !gpu.mode.is_managed() && gpu.state == GpuState::Ready;
    let mut out = above + &paint(if quiet { QUIET } else { STRONG }, &number);
    for (text, style) in [
        (name.as_str(), if quiet { QUIET } else { PLAIN }),
        (address.as_str(), QUIET),
        (sharing.as_str(), QUIET),
        (state_word, state_style),
    ] {
        if !text.is_empty() {
            out += &format!("  {}", paint(style, text));
        }
    }
    if right.is_empty() {
        return out;
    }
    out + &" ".repeat(fill) + &paint(if quiet { QUIET } else { PLAIN }, &right)
}

/// Replaces the heading of a GPU by a heading for several GPUs that are drawn together.
/// `usage` is shown before the memory.
pub(crate) fn group(block: &mut [String], gpu: &Gpu, others: &[&Gpu], usage: &str, look: &Appearance) {
    if let Some(first) = block.first_mut().filter(|_| !others.is_empty()) {
        *first = heading_with(gpu, others, usage, look);
    }
}

/// Returns whether two GPUs can have one heading: only their index, address and memory may differ.
pub(crate) fn is_alike(one: &Gpu, other: &Gpu) -> bool {
    (&one.name, one.mode, &one.rule, one.state) == (&other.name, other.mode, &other.rule, other.state)
}

/// Returns whether the headings of two GPUs show the same amounts of memory.
pub(crate) fn has_same_memory(one: &Gpu, other: &Gpu) -> bool {
    memory(one) == memory(other)
}

/// Draws a GPU with its instances, MPS daemons and leases.
pub(crate) fn block(gpu: &Gpu, rows: &[Row], users: &Users<'_>, columns: Columns, look: &Appearance) -> Vec<String> {
    let mut out = vec![heading(gpu, &[], look)];
    if let Some(mig) = gpu.mig.as_ref().filter(|mig| mig.enabled) {
        out.extend(slices::of(gpu, mig, &users.devices, INDENT, look));
    }
    out.extend(rows.iter().flat_map(|r| row(r, columns, look)));
    out.extend(mps::below(&users.daemons, INDENT, look));
    out.extend(timeslice::below(gpu, INDENT, look));
    out.extend(lease::below(gpu, users.leases, INDENT, look));
    out.extend(gpu_notes::of(gpu, look));
    out
}

/// Draws a GPU in one line, with a further line for each note.
pub(crate) fn brief_block(gpu: &Gpu, users: &Users<'_>, look: &Appearance) -> Vec<String> {
    let mut out = vec![heading_with(gpu, &[], &usage(gpu, users), look)];
    out.extend(mps::notes_below(&users.daemons, INDENT, look));
    out.extend(gpu_notes::of(gpu, look));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::fixtures;

    /// Fault: `mps list -g 5` and `timeslice list -g 5` answered that no GPU was shared.
    #[test]
    fn gpus_of_other_modes_are_named_with_their_mode() {
        let gpu = |index, mode| Gpu { mode, ..fixtures::gpu(index, "A100", 40_960, None) };
        let gpus = [gpu(5, Mode::Exclusive), gpu(6, Mode::NoRule), gpu(8, Mode::Exclusive)];
        let one = of_other_modes(&gpus[..1], "time-sliced");
        assert_eq!(one, "GPU 5 is not time-sliced: its mode is `exclusive`.");
        let all = of_other_modes(&gpus, "shared through MPS");
        assert_eq!(
            all,
            "GPUs 5, 8 are not shared through MPS: their mode is `exclusive`. \
             GPU 6 is not shared through MPS: no rule of the config claims it."
        );
    }
}
