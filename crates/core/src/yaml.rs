//! Parses YAML to nodes with their positions.
//!
//! The module uses a parser that produces events, because serde stops at the first error and does
//! not keep positions. Anchors, aliases and merge keys (`<<`) are supported, because mig-parted
//! files contain them. Limits prevent a small file from expanding to a very large one.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    rc::Rc,
};

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

/// Maximum nesting depth. A mig-parted file has five levels, a web config three.
const DEEPEST: usize = 32;

/// Maximum number of entries that merge keys may copy.
const MOST_MERGED: usize = 10_000;

/// A value of the file.
#[derive(Debug)]
pub(crate) struct Node {
    /// Span in characters.
    pub(crate) span: Range<usize>,
    /// Line; the first line is 1.
    pub(crate) line: usize,
    pub(crate) kind: NodeKind,
}

#[derive(Debug)]
pub(crate) enum NodeKind {
    /// A scalar value. `plain` says whether it is written without quotes, so that it may be a
    /// number or a boolean.
    Scalar { text: String, plain: bool },
    /// A list.
    List(Vec<Rc<Node>>),
    /// A mapping, in the order of the file.
    Map(Vec<MapEntry>),
}

/// A key with its value.
pub(crate) type MapEntry = (Rc<Node>, Rc<Node>);

/// A problem, with its position.
#[derive(Debug)]
pub(crate) struct YamlError {
    pub(crate) span: Range<usize>,
    pub(crate) message: String,
    pub(crate) hint: &'static str,
    /// If two keys are equal, the span of the first key.
    pub(crate) first: Option<Range<usize>>,
}

impl YamlError {
    fn at(span: Range<usize>, message: impl Into<String>, hint: &'static str) -> Self {
        Self { span, message: message.into(), hint, first: None }
    }
}

impl Node {
    /// Returns the text of a scalar.
    pub(crate) fn text(&self) -> Option<&str> {
        match &self.kind {
            NodeKind::Scalar { text, .. } => Some(text),
            NodeKind::List(_) | NodeKind::Map(_) => None,
        }
    }

    /// Returns the kind of the node, with an article.
    pub(crate) fn what(&self) -> &'static str {
        match &self.kind {
            NodeKind::Scalar { text, plain: true } if matches!(text.as_str(), "" | "~" | "null") => "nothing",
            NodeKind::Scalar { .. } => "a single value",
            NodeKind::List(_) => "a list",
            NodeKind::Map(_) => "a mapping",
        }
    }
}

/// A list or mapping that is not complete yet.
struct Open {
    span: Range<usize>,
    line: usize,
    anchor: usize,
    items: Vec<Rc<Node>>,
    map: bool,
}

/// Parses the only document of a text; `None` if there is no document.
pub(crate) fn document(text: &str) -> Result<Option<Rc<Node>>, YamlError> {
    let mut builder = Builder { anchors: BTreeMap::new(), stack: Vec::new(), merged: 0 };
    let mut root = None;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            let at = error.marker().index();
            YamlError::at(
                at..at + 1,
                format!("this is not YAML: {}", error.info()),
                "write YAML, as https://yaml.org describes",
            )
        })?;
        let done = match event {
            Event::DocumentStart(_) if root.is_some() => {
                let what = "a second document begins here";
                return Err(YamlError::at(place(&span), what, "keep one document: it can have several labels"));
            }
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) | Event::DocumentEnd => {
                continue;
            }
            Event::Alias(anchor) => match builder.anchors.get(&anchor) {
                Some(node) => builder.put(Rc::clone(node), 0),
                None => {
                    return Err(YamlError::at(
                        place(&span),
                        "this alias is inside its own anchor",
                        "write the value itself instead of this alias",
                    ));
                }
            },
            Event::Scalar(text, style, anchor, tag) => {
                let string = tag.is_some_and(|tag| tag.is_yaml_core_schema() && tag.suffix == "str");
                let plain = style == ScalarStyle::Plain && !string;
                let kind = NodeKind::Scalar { text: text.into_owned(), plain };
                builder.put(Rc::new(Node { span: place(&span), line: span.start.line(), kind }), anchor)
            }
            Event::SequenceStart(anchor, _) => builder.open(&span, anchor, false)?,
            Event::MappingStart(anchor, _) => builder.open(&span, anchor, true)?,
            Event::SequenceEnd | Event::MappingEnd => builder.close()?,
        };
        root = root.or(done);
    }
    Ok(root)
}

/// Converts a span of characters to a span of bytes on one line.
pub(crate) fn bytes(text: &str, span: &Range<usize>) -> Range<usize> {
    let at = |n| text.char_indices().nth(n).map_or(text.len(), |(at, _)| at);
    let start = at(span.start);
    let line = text[start..].find(['\n', '\r']).map_or(text.len(), |n| start + n);
    start..at(span.end).clamp(start, line)
}

fn place(span: &Span) -> Range<usize> {
    span.start.index()..span.end.index()
}

struct Builder {
    anchors: BTreeMap<usize, Rc<Node>>,
    stack: Vec<Open>,
    merged: usize,
}

impl Builder {
    /// Adds a complete node to its parent. Returns the node if it is the root.
    fn put(&mut self, node: Rc<Node>, anchor: usize) -> Option<Rc<Node>> {
        if anchor != 0 {
            self.anchors.insert(anchor, Rc::clone(&node));
        }
        match self.stack.last_mut() {
            Some(open) => {
                open.items.push(node);
                None
            }
            None => Some(node),
        }
    }

    fn open(&mut self, span: &Span, anchor: usize, map: bool) -> Result<Option<Rc<Node>>, YamlError> {
        if self.stack.len() >= DEEPEST {
            return Err(YamlError::at(
                place(span),
                "this value is nested too deeply",
                "write fewer levels: such a file needs at most five",
            ));
        }
        let line = span.start.line();
        self.stack.push(Open { span: place(span), line, anchor, items: Vec::new(), map });
        Ok(None)
    }

    fn close(&mut self) -> Result<Option<Rc<Node>>, YamlError> {
        let Some(open) = self.stack.pop() else { return Ok(None) };
        let kind = if open.map { NodeKind::Map(self.entries(open.items)?) } else { NodeKind::List(open.items) };
        let node = Rc::new(Node { span: open.span, line: open.line, kind });
        Ok(self.put(node, open.anchor))
    }

    /// Combines keys with their values, refuses duplicate keys, and expands merge keys.
    fn entries(&mut self, items: Vec<Rc<Node>>) -> Result<Vec<MapEntry>, YamlError> {
        let mut entries = Vec::new();
        let mut seen: BTreeMap<String, Range<usize>> = BTreeMap::new();
        let mut merges = Vec::new();
        let mut items = items.into_iter();
        while let (Some(key), Some(value)) = (items.next(), items.next()) {
            let Some(text) = key.text() else {
                return Err(YamlError::at(
                    key.span.clone(),
                    "a key must be a single value",
                    "write a name before the colon",
                ));
            };
            if matches!(&key.kind, NodeKind::Scalar { text, plain: true } if text == "<<") {
                merges.push(value);
                continue;
            }
            if let Some(first) = seen.insert(text.to_owned(), key.span.clone()) {
                let what = format!("{} is repeated here", crate::quote::Quoted(text));
                return Err(YamlError {
                    first: Some(first),
                    ..YamlError::at(key.span.clone(), what, "keep one of the two")
                });
            }
            entries.push((key, value));
        }
        let mut known: BTreeSet<String> = seen.into_keys().collect();
        for merge in merges {
            let from = match &merge.kind {
                NodeKind::List(maps) => maps.clone(),
                NodeKind::Map(_) | NodeKind::Scalar { .. } => vec![Rc::clone(&merge)],
            };
            for map in from {
                let NodeKind::Map(more) = &map.kind else {
                    return Err(YamlError::at(map.span.clone(), "`<<` takes mappings", "write <<: *NAME"));
                };
                self.merged += more.len();
                if self.merged > MOST_MERGED {
                    return Err(YamlError::at(
                        merge.span.clone(),
                        "`<<` makes the file too large",
                        "write these keys without `<<`",
                    ));
                }
                for (key, value) in more {
                    if known.insert(key.text().unwrap_or_default().to_owned()) {
                        entries.push((Rc::clone(key), Rc::clone(value)));
                    }
                }
            }
        }
        Ok(entries)
    }
}
