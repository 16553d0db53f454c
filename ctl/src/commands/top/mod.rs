//! `gpushctl top`: GPUs, leases and processes, with their figures.
//!
//! ```text
//! gpushd ──► answers ──► tree ──► order ──► rows ───► text ──► stdout (`--once`)
//!               │          └──► history ──────────────┘  └───► draw ──► terminal
//!             feed ◄── session ◄── keys, signals, clock
//!                         └──► state
//! ```
//!
//! Everything from the answers to the text is pure, so tests compare pictures without gpushd and without a terminal.
//!
//! | file | subject |
//! |---|---|
//! | `answers` | what gpushd answers |
//! | `tree` | the rows as a tree: GPUs, GPU instances, leases, processes |
//! | `activity` | the activity of a row, or why it is not known |
//! | `order` | order and filter of rows |
//! | `rows` | the visible rows |
//! | `history` | past figures |
//! | `text` | the picture as text |
//! | `draw` | the text on the terminal |
//! | `state` | what the user has selected and typed |
//! | `keys` | what a key means |
//! | `ask` | questions before a lease changes |
//! | `feed` | the requests to gpushd |
//! | `session` | an open top |
//! | `terminal` | raw mode, and its end |

mod activity;
pub(super) mod answers;
mod ask;
mod draw;
mod feed;
mod history;
mod keys;
mod order;
#[cfg(test)]
mod pictures;
mod rows;
#[cfg(test)]
pub(super) mod samples;
mod session;
mod state;
mod terminal;
mod text;
mod tree;

use std::{collections::BTreeSet, io::IsTerminal as _};

use gpush_client::Client;

use crate::{
    args::{Global, TopArgs},
    exit::{Failure, Outcome},
    output::Output,
    render::Appearance,
    socket,
};

pub(super) fn run(global: &Global, args: &TopArgs, out: &Output) -> Outcome {
    let selectors = args.which.selectors();
    super::ask(global, async |client| {
        if args.once || !out.is_drawn() || !std::io::stdout().is_terminal() {
            return once(client, &selectors, out).await;
        }
        let first = answers::read_all(client, &selectors, out).await?;
        // This client prints nothing, because the picture fills the terminal.
        let mut silent =
            Client::new(socket::chosen(global)).deadline(global.request_timeout).without_waiting_for_start();
        session::run(&mut silent, first, &selectors, args.interval, out).await
    })
}

/// Prints one picture.
async fn once(client: &mut Client, selectors: &[String], out: &Output) -> Outcome {
    let answers = answers::read_with_samples(client, selectors, out).await?;
    out.show(&answers, |look| picture(&answers, look))?;
    Ok::<u8, Failure>(0)
}

/// Draws the picture of `--once`.
fn picture(answers: &answers::HostAnswers, look: &Appearance) -> String {
    // ColumnWidths have the same width in each line, also in a pipe.
    let look = &Appearance { wraps: true, ..*look };
    let nodes = tree::of(answers);
    let mut history = history::FigureHistory::default();
    history.record(&nodes);
    let lines = rows::of(&nodes, &BTreeSet::new());
    let columns = text::ColumnWidths::of(look.width);
    let header = text::header(answers, &text::Connection::Answers, look);
    let drawing = text::Drawing { status: &answers.status, history: &history, columns, look };
    text::once(&header, &lines, &drawing)
}
