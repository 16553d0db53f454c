//! `gpushctl explain`.

use gpush_core::isolation::{Aspect, SOURCES, Source, TABLE};
use serde::Serialize;

use super::mig_history;
use crate::{
    args::{Global, Topic, topic::code_name},
    exit::{Failure, Outcome},
    output::Output,
    render::{Appearance, isolation, topics},
};

/// The output of `gpushctl explain isolation --json`.
#[derive(Serialize)]
pub(super) struct Isolation {
    aspects: [Aspect; 5],
    sources: [Source; 4],
}

impl Isolation {
    pub(super) const ALL: Self = Self { aspects: TABLE, sources: SOURCES };
}

/// The output of `gpushctl explain TOPIC --json` for a topic with a text.
#[derive(Serialize)]
pub(super) struct Explanation<'t> {
    pub(super) topic: &'t str,
    pub(super) text: &'t str,
}

/// Shows the text of a topic.
fn show(topic: &str, text: impl Fn(&Appearance) -> String, out: &Output) -> Result<(), Failure> {
    let drawn = text(&out.look);
    out.show(&Explanation { topic, text: drawn.trim_end() }, |_| drawn.clone())
}

pub(super) fn run(global: &Global, topic: Topic, out: &Output) -> Outcome {
    match topic {
        Topic::Isolation => out.show(&Isolation::ALL, isolation::table)?,
        Topic::All => show("topics", topics::topics, out)?,
        Topic::Page(page) => show(page.name(), |look| topics::page(page, look), out)?,
        Topic::Xid(number) => show(&format!("xid-{number}"), |look| topics::xid(number, look), out)?,
        Topic::Lint(lint) => show(lint.number(), |look| topics::lint(lint, look), out)?,
        Topic::Code(code) => show(&code_name(code), |look| topics::code(code, look), out)?,
        Topic::MigDevice(uuid) => {
            return super::ask(global, async |client| mig_history::run(client, &uuid, out).await);
        }
    }
    Ok(0)
}
