//! Converts a mig-parted file to layouts and rules for gpush's config.
//!
//! Without a label, all labels become entries of `[layouts]`. With a label, the groups of this
//! label become `[[gpu]]` rules. mig-parted applies a label that the caller selects at each run,
//! but a rule is permanent. The import reports what rules cannot express. A config can have only
//! one `[layouts]` table, so the rules contain their layouts and can be appended to any config.

use gpush_api::GpuIndex;
use std::{collections::BTreeSet, fmt::Write as _};

use super::{DesiredMode, Devices, File, Group, Label};
use crate::{
    layout::{DYNAMIC, Layout, NONE},
    quote::Quoted,
    selector::{self, DeviceId},
};

/// NVIDIA's PCI vendor id.
const NVIDIA: u32 = 0x10de;

/// Maximum length of a layout's name, without the number that may be appended.
const LONGEST_NAME: usize = 58;

/// A converted part of a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// TOML.
    pub text: String,
    /// What the text omits, one sentence each.
    pub remarks: Vec<String>,
}

/// Returns the layouts of `file`. With a label, returns the rules of that label instead.
#[must_use]
pub fn import(file: &File, label: Option<&Label>) -> Imported {
    let mut remarks = Vec::new();
    let mut text = String::new();
    let _ = writeln!(
        text,
        "# from the mig-parted file {}{}",
        comment(&file.path),
        match label {
            Some(label) => format!(", label {}", comment(&label.name)),
            None => String::new(),
        }
    );
    match label {
        Some(label) => rules(&mut text, file, label, &mut remarks),
        None => {
            layouts(&mut text, file, &mut remarks);
            remarks.push("to import rules, select one label: -c LABEL".to_owned());
        }
    }
    Imported { text, remarks }
}

/// Writes all layouts of the file, with names. A layout in a config cannot be empty, so a label
/// without instances is reported instead.
fn layouts(text: &mut String, file: &File, remarks: &mut Vec<String>) {
    let mut without = Vec::new();
    let mut in_part = Vec::new();
    let mut names = Names { taken: BTreeSet::new() };
    let mut header = "[layouts]\n";
    for label in &file.labels {
        let mut known: Vec<&Layout> = Vec::new();
        for group in &label.groups {
            let DesiredMode::On(layout) = &group.want else { continue };
            if layout.is_none() || known.contains(&layout) {
                continue;
            }
            known.push(layout);
            let name = names.fresh(&label.name);
            let was = if name == label.name { String::new() } else { format!("  # {}", comment(&label.name)) };
            let _ = writeln!(text, "{header}{name} = {}{was}", entries(layout));
            header = "";
        }
        let has_none = |group: &Group| match &group.want {
            DesiredMode::On(layout) => layout.is_none(),
            DesiredMode::Off => true,
        };
        if known.is_empty() {
            without.push(Quoted(&label.name).to_string());
        } else if label.groups.iter().any(has_none) {
            in_part.push(Quoted(&label.name).to_string());
        }
    }
    if !without.is_empty() {
        remarks.push(format!(
            "labels without instances are not imported as layouts: {}; to import such a label as rules, add -c LABEL; \
            to remove all instances, run `gpushctl mig apply {NONE} -g all` (administrator)",
            without.join(", ")
        ));
    }
    if !in_part.is_empty() {
        let label = if in_part.len() == 1 { "label" } else { "labels" };
        remarks.push(format!("in {label} {}, device groups without MIG instances are left out", in_part.join(", ")));
    }
}

/// Formats a layout as a list for the config.
fn entries(layout: &Layout) -> String {
    let entries: Vec<String> = layout.canonical().into_iter().map(string).collect();
    format!("[{}]", entries.join(", "))
}

/// Names of layouts that are already used.
struct Names {
    taken: BTreeSet<String>,
}

impl Names {
    /// Returns a unique name for a layout, derived from the name of the label. The name consists of
    /// letters, digits, `-` and `_`.
    fn fresh(&mut self, label: &str) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
        let mut name: String = label.chars().map(plain).take(LONGEST_NAME).collect();
        if !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
            name.insert_str(0, "l-");
        }
        if [NONE, DYNAMIC].iter().any(|word| name.eq_ignore_ascii_case(word)) {
            name += "-layout";
        }
        name.truncate(LONGEST_NAME);
        let mut fresh = name.clone();
        let mut number = 2;
        while !self.taken.insert(fresh.clone()) {
            fresh = format!("{name}-{number}");
            number += 1;
        }
        fresh
    }
}

/// GPUs that earlier rules match.
#[derive(Default)]
struct Claimed {
    all: bool,
    indexes: BTreeSet<GpuIndex>,
    ids: BTreeSet<DeviceId>,
}

fn rules(text: &mut String, file: &File, label: &Label, remarks: &mut Vec<String>) {
    let mut claimed = Claimed::default();
    // In a mig-parted file, the last group that matches a GPU applies. In gpush's config, the first
    // rule that matches the GPU applies. So the rules are in reverse order.
    let mut rules = Vec::new();
    let before = remarks.len();
    for group in label.groups.iter().rev() {
        let place = format!("{}:{}", file.path, group.line);
        let selectors = selectors(group, &place, &mut claimed, remarks);
        if selectors.is_empty() {
            remarks.push(format!("{place}: no rule was written for this group"));
        } else {
            rules.push((selectors, &group.want));
        }
    }
    remarks[before..].reverse();
    // If no GPU can be in two groups, keep the order of the file.
    let listed = |group: &Group| matches!(group.devices, Devices::Listed(_));
    let groups = &label.groups;
    let apart = groups.iter().all(listed) || groups.iter().all(|group| !listed(group) && !group.filter.is_empty());
    if apart && rules.len() == groups.len() {
        rules.reverse();
    }
    for (selectors, want) in rules {
        let _ = writeln!(text);
        for (selector, names) in selectors.iter().filter_map(|one| Some((one, products(one.parse().ok()?)))) {
            let names =
                if names.is_empty() { "a model that this gpushctl does not know".to_owned() } else { names.join(", ") };
            let _ = writeln!(text, "# {selector}: {names}");
        }
        let selectors: Vec<String> = selectors.into_iter().map(string).collect();
        let _ = writeln!(text, "[[gpu]]\nmatch = [{}]", selectors.join(", "));
        match want {
            DesiredMode::On(layout) if layout.is_none() => {
                let _ = writeln!(text, "mode = \"mig\"\nlayout = \"{NONE}\"");
            }
            DesiredMode::On(layout) => {
                let _ = writeln!(text, "mode = \"mig\"\nlayout = {}", entries(layout));
            }
            DesiredMode::Off => {
                let _ = writeln!(text, "mode = \"exclusive\"");
            }
        }
    }
}

/// Returns the selectors of a rule for the group. The list is empty if selectors cannot express the
/// group, or if other rules already match all its GPUs.
fn selectors(group: &Group, place: &str, claimed: &mut Claimed, remarks: &mut Vec<String>) -> Vec<String> {
    if claimed.all {
        remarks.push(format!("{place}: a later group selects every GPU, so this group has no effect"));
        return Vec::new();
    }
    match &group.devices {
        Devices::Listed(indexes) => {
            if !group.filter.is_empty() {
                remarks.push(format!(
                    "{place}: the device-filter is left out, because the rule selects the GPUs of this group by index"
                ));
            }
            let fresh: Vec<GpuIndex> = indexes.iter().copied().filter(|index| claimed.indexes.insert(*index)).collect();
            if fresh.len() < indexes.len() {
                remarks.push(format!(
                    "{place}: later groups select some of these GPUs too, so this group leaves them out"
                ));
            }
            selector::ranges(fresh)
        }
        Devices::All if group.filter.is_empty() => {
            claimed.all = true;
            if group.want != DesiredMode::Off {
                remarks.push(format!(
                    "{place}: the rule for all GPUs fails on GPUs without MIG: if the host has such GPUs, put a rule \
                    for them first, such as match = [\"NVIDIA L4\"], mode = \"unmanaged\""
                ));
            }
            vec!["all".to_owned()]
        }
        Devices::All => {
            let mut selectors = Vec::new();
            for id in &group.filter {
                if claimed.ids.iter().any(|earlier| earlier.covers(*id)) {
                    remarks.push(format!("{place}: {id}: a rule already selects these GPUs"));
                } else {
                    claimed.ids.insert(*id);
                    selectors.push(id.to_string());
                }
            }
            selectors
        }
    }
}

/// Returns the product names that drivers report for GPUs with these ids. Boards with one device id may have several
/// names. The list is empty if this version knows no board with these ids.
fn products(id: DeviceId) -> Vec<String> {
    let with_vendor = |id: &str| u32::from_str_radix(id, 16).ok().map(|id| id << 16 | NVIDIA);
    let mut names: Vec<String> = gpush_geometry::KEYS
        .iter()
        .filter_map(|key| gpush_geometry::model(key))
        .flat_map(|model| model.boards)
        .filter_map(|board| {
            let subsystem = board.subsystem_id.as_deref().and_then(with_vendor);
            id.covers(DeviceId { id: with_vendor(&board.device_id)?, subsystem }).then_some(board.product)
        })
        .collect();
    // Boards with other subsystem ids exist too. They have the names of the model.
    if names.is_empty() && id.subsystem.is_some() {
        names = products(DeviceId { subsystem: None, ..id });
    }
    names.sort();
    names.dedup();
    names
}

fn string(value: String) -> String {
    toml::Value::String(value).to_string()
}

/// Returns the text on one line, for a comment in the config.
fn comment(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}
