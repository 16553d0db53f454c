//! `gpushctl version`.

use gpush_api::{ApiError, Version};
use gpush_client::Client;
use serde::Serialize;

use crate::{exit::Outcome, output::Output};

/// The output of `gpushctl version --json`.
#[derive(Serialize)]
pub(super) struct Versions<'a> {
    /// Version of gpushctl.
    pub(super) ctl: &'static str,
    /// Version of the API that gpushctl uses.
    pub(super) api: &'static str,
    /// What gpushd answers about its version.
    #[serde(rename = "gpushd", skip_serializing_if = "Option::is_none")]
    pub(super) agent: Option<&'a Version>,
    /// Why the version of gpushd is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<ApiError>,
}

pub(super) async fn run(client: &mut Client, out: &Output) -> Outcome {
    let ctl = env!("CARGO_PKG_VERSION");
    let api = gpush_client::API;
    let agent = client.version().await;
    if out.json {
        let error = agent.as_ref().err().map(|e| ApiError::clone(&e.error));
        let status = error.as_ref().map_or(0, |e| e.code.exit_status());
        out.document(&Versions { ctl, api, agent: agent.as_ref().ok(), error })?;
        return Ok(status);
    }
    let mut text = format!("gpushctl  {ctl}\nAPI       {api}\n");
    // Print gpushctl's own version first, so that it is shown even if gpushd cannot be reached.
    let agent = match agent {
        Ok(agent) => agent,
        Err(error) => {
            out.text(&text)?;
            return Err(error.into());
        }
    };
    let look = &out.look;
    text += &format!("gpushd    {} (API {})\n", look.clean(&agent.agent), look.clean(&agent.api));
    text += &match &agent.driver {
        Some(driver) => {
            let simulated = if driver.simulated { ", SIMULATED: no hardware behind it" } else { "" };
            format!(
                "driver    {} (NVML {}, CUDA {}){simulated}\nlibrary   {}\n",
                look.clean(&driver.version),
                look.clean(&driver.nvml),
                look.clean(&driver.cuda),
                look.clean(&driver.library)
            )
        }
        None => "driver    none\n".to_owned(),
    };
    out.text(&text)?;
    Ok(0)
}
