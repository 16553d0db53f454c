//! Converts YAML nodes to a file. Reports all missing, unknown and invalid parts at once, each with
//! its position.

use std::ops::Range;

use super::{DesiredMode, File, Group, InvalidLabels, Label, MOST_BYTES};
use crate::{
    diagnostic::{self, Document, FileErrors, MOST_PROBLEMS, Problem},
    layout::Layout,
    nearest::nearest,
    quote::Quoted,
    yaml::{self, Node, NodeKind},
};

/// Maximum number of groups in all labels together. YAML aliases can multiply the content of a
/// small file.
const MOST_GROUPS: usize = 4096;

const TOP: [&str; 2] = ["version", "mig-configs"];
const GROUP: [&str; 4] = ["devices", "device-filter", "mig-enabled", "mig-devices"];

/// Parses the valid labels. If every problem is inside a label, also returns the problems of the
/// invalid labels.
pub(super) fn bytes(bytes: &[u8], path: &str) -> Result<(File, Option<InvalidLabels>), FileErrors> {
    let fail = |text: &str, problem| Err(FileErrors::new(Document::MigParted, path, text, vec![problem]));
    if bytes.len() > MOST_BYTES {
        let what = format!("the file has more than {MOST_BYTES} bytes");
        return fail("", Problem::new(0..0, what, "check that this is the mig-parted file"));
    }
    let text = match diagnostic::text(bytes) {
        // A byte order mark is not part of the YAML text.
        Ok(text) => text.strip_prefix('\u{feff}').unwrap_or(text),
        Err((lossy, problem)) => return fail(&lossy, problem),
    };
    let mut reader = PartedReader { text, problems: Vec::new(), groups: 0, wrong: Vec::new(), beyond_labels: false };
    let labels = match yaml::document(text) {
        Ok(Some(root)) => reader.top(&root),
        Ok(None) => {
            reader.report(&(0..0), "the file is empty", "write `version: v1` first, then `mig-configs:`");
            Vec::new()
        }
        Err(wrong) => {
            let mut problem = Problem::new(yaml::bytes(text, &wrong.span), wrong.message, wrong.hint);
            if let Some(first) = wrong.first {
                problem = problem.also(yaml::bytes(text, &first), "the first is");
            }
            reader.problems.push(problem);
            Vec::new()
        }
    };
    let PartedReader { problems, wrong, beyond_labels, .. } = reader;
    if problems.is_empty() {
        return Ok((File { path: path.to_owned(), labels }, None));
    }
    let errors = FileErrors::new(Document::MigParted, path, text, problems);
    if beyond_labels || labels.is_empty() {
        return Err(errors);
    }
    Ok((File { path: path.to_owned(), labels }, Some(InvalidLabels { labels: wrong, errors })))
}

pub(super) struct PartedReader<'t> {
    text: &'t str,
    problems: Vec<Problem>,
    groups: usize,
    /// Names of labels that are invalid or were not read.
    wrong: Vec<String>,
    /// Whether a problem is outside all labels.
    beyond_labels: bool,
}

impl PartedReader<'_> {
    pub(super) fn report(&mut self, span: &Range<usize>, message: impl Into<String>, hint: impl Into<String>) {
        if self.problems.len() < MOST_PROBLEMS {
            self.problems.push(Problem::new(yaml::bytes(self.text, span), message, hint));
        }
    }

    /// Returns whether the maximum number of problems is reached, so that parsing can stop.
    pub(super) fn has_max_problems(&self) -> bool {
        self.problems.len() >= MOST_PROBLEMS
    }

    /// Reports keys that are not in `known`. Returns the known keys that the author probably meant.
    fn report_unknown_keys(
        &mut self,
        entries: &[yaml::MapEntry],
        known: &[&'static str],
        place: &str,
    ) -> Vec<&'static str> {
        let mut all = Vec::new();
        for (key, _) in entries {
            let name = key.text().unwrap_or_default();
            if known.contains(&name) {
                continue;
            }
            let hint = match nearest(name, known.iter().copied()) {
                _ if matches!(name, "apiVersion" | "kind" | "metadata" | "data") => {
                    "this is a Kubernetes object: extract the mig-parted file from it, such as `config.yaml` under \
                    `data`"
                        .to_owned()
                }
                Some(meant) => {
                    all.extend(known.iter().copied().find(|known| *known == meant));
                    format!("did you mean `{meant}`?")
                }
                None => format!("write one of: {}", known.join(", ")),
            };
            self.report(&key.span, format!("unknown key {} {place}", Quoted(name)), hint);
        }
        all
    }

    fn top(&mut self, root: &Node) -> Vec<Label> {
        let NodeKind::Map(entries) = &root.kind else {
            let what = format!("the file is {}, but a mig-parted file is a mapping", root.what());
            self.report(&root.span, what, "write `version: v1` first, then `mig-configs:`");
            return Vec::new();
        };
        let meant = self.report_unknown_keys(entries, &TOP, "at the top of the file");
        match get(entries, "version") {
            Some(node) if node.text() == Some("v1") => {}
            Some(node) => {
                let what = match node.text() {
                    Some(text) => format!("version {} is not supported", Quoted(text)),
                    None => format!("`version` is {}", node.what()),
                };
                self.report(&node.span, what, "write version: v1");
            }
            None if meant.contains(&"version") => {}
            None => self.report(&root.span, "the file has no `version`", "write version: v1 at the top of the file"),
        }
        match get(entries, "mig-configs") {
            Some(node) => self.labels(node),
            None => {
                if !meant.contains(&"mig-configs")
                    && !self.has_max_problems()
                    && meant.is_empty()
                    && has_all_known(entries)
                {
                    self.report(
                        &root.span,
                        "the file has no `mig-configs`",
                        "write mig-configs: and, below it, the labels",
                    );
                }
                Vec::new()
            }
        }
    }

    fn labels(&mut self, node: &Node) -> Vec<Label> {
        let entries = match &node.kind {
            NodeKind::Map(entries) if !entries.is_empty() => entries,
            NodeKind::Map(_) | NodeKind::List(_) | NodeKind::Scalar { .. } => {
                let what = format!("`mig-configs` takes labels, not {}", node.what());
                let what =
                    if matches!(node.kind, NodeKind::Map(_)) { "`mig-configs` has no label".to_owned() } else { what };
                self.report(
                    &node.span,
                    what,
                    "write the name of a label with a colon, and the groups of the label below it",
                );
                return Vec::new();
            }
        };
        self.beyond_labels = !self.problems.is_empty();
        let mut labels = Vec::new();
        for (key, value) in entries {
            let before = self.problems.len();
            let label = if self.has_max_problems() { None } else { self.label(key, value) };
            match label.filter(|_| self.problems.len() == before) {
                Some(label) => labels.push(label),
                None => self.wrong.push(key.text().unwrap_or_default().to_owned()),
            }
        }
        labels
    }

    fn label(&mut self, key: &Node, value: &Node) -> Option<Label> {
        let name = key.text().unwrap_or_default();
        if name.trim().is_empty() {
            self.report(&key.span, "a label has no name", "write a name before the colon");
            return None;
        }
        let items = match &value.kind {
            NodeKind::List(items) if !items.is_empty() => items,
            NodeKind::Scalar { .. } | NodeKind::Map(_) | NodeKind::List(_) => {
                let what = format!("label {} has no list of groups", Quoted(name));
                self.report(&key.span, what, "write `- devices: all` and the settings for them below it");
                return None;
            }
        };
        if self.groups > MOST_GROUPS {
            // The problem is reported only once, at the first group above the maximum.
            return None;
        }
        self.groups += items.len();
        if self.groups > MOST_GROUPS {
            let what = format!("with label {} the file has more than {MOST_GROUPS} groups", Quoted(name));
            self.report(&key.span, what, "put GPUs with the same layout into one group");
            return None;
        }
        let groups = items.iter().filter_map(|item| self.group(item)).collect();
        Some(Label { name: name.to_owned(), groups })
    }

    fn group(&mut self, node: &Node) -> Option<Group> {
        if self.has_max_problems() {
            return None;
        }
        let NodeKind::Map(entries) = &node.kind else {
            let what = format!("a group must be a mapping, not {}", node.what());
            self.report(&node.span, what, format!("write the keys of a group: {}", GROUP.join(", ")));
            return None;
        };
        let meant = self.report_unknown_keys(entries, &GROUP, "in a group");
        let filter = match get(entries, "device-filter") {
            Some(value) => self.filter(value)?,
            None => Vec::new(),
        };
        let devices = match get(entries, "devices") {
            Some(value) => self.devices(value),
            None => {
                self.missing(node, "devices", &meant, "write devices: all, or a list of indexes: [0, 1]");
                None
            }
        };
        let enabled = match get(entries, "mig-enabled") {
            Some(value) => self.flag(value),
            None => {
                self.missing(node, "mig-enabled", &meant, "write mig-enabled: true or mig-enabled: false");
                None
            }
        };
        let layout = get(entries, "mig-devices").map(|value| (value, self.layout(value)));
        let want = match (enabled?, layout) {
            (false, None) => DesiredMode::Off,
            (false, Some((_, layout))) if layout.as_ref().is_none_or(Layout::is_none) => {
                layout?;
                DesiredMode::Off
            }
            (false, Some((value, _))) => {
                let hint = "write mig-enabled: true, or leave mig-devices out";
                self.report(
                    &value.span,
                    "this group has `mig-enabled: false`, but `mig-devices` contains instances",
                    hint,
                );
                return None;
            }
            (true, Some((_, layout))) => DesiredMode::On(layout?),
            (true, None) => {
                let hint = "write mig-devices: {\"1g.10gb\": 7}, or {} for no instance";
                self.missing(node, "mig-devices", &meant, hint);
                return None;
            }
        };
        Some(Group { line: node.line, filter, devices: devices?, want })
    }

    fn missing(&mut self, node: &Node, key: &str, meant: &[&str], hint: &str) {
        if !meant.contains(&key) {
            self.report(&node.span, format!("this group has no `{key}`"), hint);
        }
    }
}

/// Returns whether all keys are known. Only in this case, a missing key is reported.
fn has_all_known(entries: &[yaml::MapEntry]) -> bool {
    entries.iter().all(|(key, _)| key.text().is_some_and(|name| TOP.contains(&name)))
}

fn get<'n>(entries: &'n [yaml::MapEntry], name: &str) -> Option<&'n Node> {
    entries.iter().find(|(key, _)| key.text() == Some(name)).map(|(_, value)| value.as_ref())
}
