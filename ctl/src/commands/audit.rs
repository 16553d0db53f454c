//! `gpushctl audit`: who changed what.

use gpush_client::{AuditQuery, Client};

use crate::{args, exit::Outcome, output::Output, render::audit};

/// Records that are asked for at once.
const PAGE: usize = 1000;

pub(super) async fn run(client: &mut Client, args: &args::AuditArgs, out: &Output) -> Outcome {
    let since = args.since.map(|since| since.before(out.look.now));
    let number = args.number.or_else(|| since.is_none().then_some(args::AUDIT_USUALLY));
    let mut query = AuditQuery { after: None, limit: number.unwrap_or(PAGE), object: args.object.clone(), since };
    let mut records = Vec::new();
    if number.is_some() {
        records = client.audit(&query).await?;
    } else {
        // All since then, page by page from the oldest.
        query.after = Some(0);
        loop {
            let page = client.audit(&query).await?;
            query.after = page.last().map(|last| last.sequence);
            let full = page.len() == PAGE;
            records.extend(page);
            if !full {
                break;
            }
        }
    }
    if records.is_empty() && !out.json {
        out.remark("No record of that kind.\n");
        return Ok(0);
    }
    out.show(&records, |look| audit::records(&records, look))?;
    Ok(0)
}
