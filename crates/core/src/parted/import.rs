//! A mig-parted file as the layouts and rules of our config, ready to paste.
//!
//! Labels become `[layouts]`. The groups of one label become `[[gpu]]` rules: a label is chosen at
//! each run of mig-parted, a rule holds. What a rule can't say is told beside it.

use std::{collections::BTreeSet, fmt::Write as _};

use super::{DeviceId, Devices, File, Group, Label, Want};
use crate::layout::{DYNAMIC, Layout, NONE};

/// NVIDIA's PCI vendor id.
const NVIDIA: u32 = 0x10de;

/// Longest name that a layout may have, less room for a number behind it.
const LONGEST_NAME: usize = 58;

/// Part of a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// TOML.
    pub text: String,
    /// What it does not say, one sentence each.
    pub remarks: Vec<String>,
}

/// The layouts of `file`; with a label, those of this label and its rules.
#[must_use]
pub fn import(file: &File, label: Option<&Label>) -> Imported {
    let mut remarks = Vec::new();
    let labels: Vec<&Label> = label.map_or_else(|| file.labels.iter().collect(), |label| vec![label]);
    let mut names = Names { taken: BTreeSet::new() };
    let named: Vec<Named<'_>> = labels.into_iter().map(|label| names.of(label)).collect();
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
    if named.iter().any(|named| !named.layouts.is_empty()) {
        text += "[layouts]\n";
    }
    for Named { label, layouts, .. } in &named {
        for (name, layout) in layouts {
            let entries: Vec<String> = layout.canonical().into_iter().map(string).collect();
            let was = if *name == label.name { String::new() } else { format!("  # {}", comment(&label.name)) };
            let _ = writeln!(text, "{name} = [{}]{was}", entries.join(", "));
        }
    }
    match label {
        Some(_) => {
            for named in &named {
                rules(&mut text, file, named, &mut remarks);
            }
        }
        None => remarks.push("rules are made of one label: name it with -c to have them too".to_owned()),
    }
    Imported { text, remarks }
}

/// A label whose layouts have names.
struct Named<'l> {
    label: &'l Label,
    /// The layout of each group; `None` for MIG mode off.
    of_groups: Vec<Option<String>>,
    /// Each once.
    layouts: Vec<(String, &'l Layout)>,
}

/// Names of layouts that were given.
struct Names {
    taken: BTreeSet<String>,
}

impl Names {
    fn of<'l>(&mut self, label: &'l Label) -> Named<'l> {
        let mut layouts: Vec<(String, &Layout)> = Vec::new();
        let mut of_groups = Vec::new();
        for group in &label.groups {
            let name = match &group.want {
                Want::Off => None,
                Want::On(layout) if layout.is_none() => Some(NONE.to_owned()),
                Want::On(layout) => Some(match layouts.iter().find(|(_, known)| *known == layout) {
                    Some((name, _)) => name.clone(),
                    None => {
                        let name = self.fresh(&label.name);
                        layouts.push((name.clone(), layout));
                        name
                    }
                }),
            };
            of_groups.push(name);
        }
        Named { label, of_groups, layouts }
    }

    /// A name for a layout, after the label's: letters, digits, `-` and `_`, and not taken.
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

/// GPUs that earlier rules have.
#[derive(Default)]
struct Claimed {
    all: bool,
    indexes: BTreeSet<u32>,
    products: BTreeSet<String>,
}

fn rules(text: &mut String, file: &File, named: &Named<'_>, remarks: &mut Vec<String>) {
    let mut claimed = Claimed::default();
    if named.of_groups.contains(&None) {
        remarks.push("mode exclusive shows MIG mode as drift, and does not switch it off".to_owned());
    }
    // The last group that speaks of a GPU holds, and the first rule that matches it.
    let mut rules = Vec::new();
    let before = remarks.len();
    for (group, name) in named.label.groups.iter().zip(&named.of_groups).rev() {
        let place = format!("{}:{}", file.path, group.line);
        let selectors = selectors(group, &place, &mut claimed, remarks);
        if selectors.is_empty() {
            remarks.push(format!("{place}: this group has no rule"));
        } else {
            rules.push((selectors, name));
        }
    }
    remarks[before..].reverse();
    // Where no GPU can be in two groups the order of the file is the more familiar one.
    let listed = |group: &Group| matches!(group.devices, Devices::Listed(_));
    let groups = &named.label.groups;
    let apart = groups.iter().all(listed) || groups.iter().all(|group| !listed(group) && !group.filter.is_empty());
    if apart && rules.len() == groups.len() {
        rules.reverse();
    }
    for (selectors, name) in rules {
        let selectors: Vec<String> = selectors.into_iter().map(string).collect();
        let _ = writeln!(text, "\n[[gpu]]\nmatch = [{}]", selectors.join(", "));
        match name {
            Some(name) => {
                let _ = writeln!(text, "mode = \"mig\"\nlayout = \"{name}\"");
            }
            None => {
                let _ = writeln!(text, "mode = \"exclusive\"");
            }
        }
    }
}

/// What a rule for the group matches; nothing when no selector says it, or rules before it have it all.
fn selectors(group: &Group, place: &str, claimed: &mut Claimed, remarks: &mut Vec<String>) -> Vec<String> {
    if claimed.all {
        remarks.push(format!("{place}: a later group is for every GPU"));
        return Vec::new();
    }
    match &group.devices {
        Devices::Listed(indexes) => {
            if !group.filter.is_empty() {
                remarks.push(format!("{place}: the device-filter is left out: a rule matches by index or by product"));
            }
            let fresh: Vec<u32> = indexes.iter().copied().filter(|index| claimed.indexes.insert(*index)).collect();
            if fresh.len() < indexes.len() {
                remarks.push(format!("{place}: later groups have some of these indexes"));
            }
            ranges(&fresh)
        }
        Devices::All if group.filter.is_empty() => {
            claimed.all = true;
            vec!["all".to_owned()]
        }
        Devices::All => {
            let mut selectors = Vec::new();
            for id in &group.filter {
                if id.subsystem.is_some() {
                    remarks.push(format!("{place}: {id}: a rule does not tell boards apart by their subsystem"));
                }
                match product(*id) {
                    Some(product) if claimed.products.insert(product.to_lowercase()) => selectors.push(product),
                    Some(product) => remarks.push(format!("{place}: {id}: a rule has {product} already")),
                    None => remarks.push(format!(
                        "{place}: {id} is a part that this build does not know: write its product name, as \
                         `gpushctl gpu list` shows it, into a rule"
                    )),
                }
            }
            selectors
        }
    }
}

/// Product name of a part, as its driver tells it.
fn product(id: DeviceId) -> Option<String> {
    if id.id & 0xffff != NVIDIA {
        return None;
    }
    let device = format!("{:04X}", id.device());
    gpush_geometry::KEYS
        .iter()
        .filter_map(|key| gpush_geometry::model(key))
        .flat_map(|model| model.boards.clone())
        .find(|board| board.device_id.eq_ignore_ascii_case(&device))
        .map(|board| board.product)
}

/// `0-2`, `5` for 0, 1, 2, 5.
fn ranges(indexes: &[u32]) -> Vec<String> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for index in indexes {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*index) => *last = *index,
            Some(_) | None => runs.push((*index, *index)),
        }
    }
    runs.iter().map(|(from, to)| if from == to { from.to_string() } else { format!("{from}-{to}") }).collect()
}

fn string(value: String) -> String {
    toml::Value::String(value).to_string()
}

/// Text within a comment: on one line.
fn comment(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}
