//! `gpushctl bill`.

use gpush_api::{ApiError, Code};
use gpush_client::{BillSelection, Client};

use super::{lease::uid_of, usage::recorded_name};
use crate::{args::BillArgs, exit::Outcome, output::Output, render::bill};

pub(super) async fn run(client: &mut Client, args: &BillArgs, out: &Output) -> Outcome {
    let selection = BillSelection {
        month: args.month.as_ref().map(|month| month.text.clone()),
        model: args.model,
        user: args.user.as_deref().map(recorded_name),
    };
    if args.focus || out.look.exact {
        if out.json {
            let error = ApiError::new(Code::BadRequest, "`--focus` prints CSV, not JSON");
            return Err(error.hint("leave out `-o json` or `--focus`").into());
        }
        let rows = client.bill_rows(&selection, args.focus).await?;
        let headed = if out.look.headings { &rows[..] } else { without_first_line(&rows) };
        out.verbatim(headed)?;
        return Ok(0);
    }
    let made = client.bill(&selection, args.by).await?;
    if let Some(user) = args.user.as_deref().filter(|_| made.lines.is_empty()) {
        // A user who was deleted since still has the recorded use, so only a user without a bill is looked up.
        uid_of(user)?;
    }
    let gpus = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
    out.list(&made, |look| bill::list(&made, &gpus, look))?;
    Ok(0)
}

fn without_first_line(rows: &[u8]) -> &[u8] {
    let end = rows.iter().position(|byte| *byte == b'\n').map_or(rows.len(), |at| at + 1);
    &rows[end..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_line_is_left_out_without_headings() {
        assert_eq!(without_first_line(b"a,b\r\n1,2\r\n"), b"1,2\r\n");
        assert_eq!(without_first_line(b"a,b"), b"");
    }
}
