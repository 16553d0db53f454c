//! The arguments of `metrics`.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, Subcommand};

/// `gpushctl metrics`.
#[derive(Debug, Subcommand)]
pub(crate) enum Metrics {
    /// Print the metrics that you may see
    #[command(after_help = "\
Examples:
  gpushctl metrics show
  gpushctl metrics show --public
  gpushctl metrics show --openmetrics")]
    Show(MetricsShowArgs),
    /// Write the metrics to FILE, for node_exporter
    #[command(after_help = "\
FILE is in the directory that node_exporter reads
(--collector.textfile.directory), and its name ends with .prom. The command
replaces FILE as a whole: if it fails, the old FILE does not change. Only the
owner and the group can read FILE (mode 0640). The timer
gpush-metrics-write.timer runs the command every 15 seconds.

Examples:
  gpushctl metrics write /var/lib/prometheus/node-exporter/gpush.prom
  gpushctl metrics write --group prometheus /srv/textfile/gpush.prom")]
    Write(MetricsWriteArgs),
    /// Serve the metrics over HTTP, for Prometheus
    #[command(after_help = "\
The web config has the form of Prometheus' exporter-toolkit:
tls_server_config and basic_auth_users. Without a password, the command serves
only the metrics that every user may see. An address that other hosts can
reach needs TLS and a password. The command reads the files again when they
change, and after SIGHUP. The unit gpush-metrics.service runs the command.

Examples:
  gpushctl metrics serve
  gpushctl metrics serve --listen 0.0.0.0:9945 \\
    --web-config /etc/gpush/web-config.yml")]
    Serve(MetricsServeArgs),
}

#[derive(Debug, Args)]
pub(crate) struct MetricsShowArgs {
    /// Print the format OpenMetrics instead of the classic format
    #[arg(long)]
    pub(crate) openmetrics: bool,
    #[command(flatten)]
    pub(crate) selection: MetricsSelection,
}

#[derive(Debug, Args)]
pub(crate) struct MetricsWriteArgs {
    /// File to replace; its name ends with .prom
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Group of FILE, which can read it [default: the group of the process]
    #[arg(long, value_name = "GROUP")]
    pub(crate) group: Option<String>,
    #[command(flatten)]
    pub(crate) selection: MetricsSelection,
}

#[derive(Debug, Args)]
pub(crate) struct MetricsServeArgs {
    /// IP address and port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9945", value_parser = address)]
    pub(crate) listen: SocketAddr,
    /// File with the certificate and the passwords
    #[arg(long, value_name = "FILE")]
    pub(crate) web_config: Option<PathBuf>,
}

/// Which metrics a command requests.
#[derive(Debug, Args)]
pub(crate) struct MetricsSelection {
    /// Only the metrics that every user may see: no users, jobs and leases
    #[arg(long)]
    pub(crate) public: bool,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write an IP address and a port, such as 127.0.0.1:9945 or [::1]:9945".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_an_ip_address_with_a_port() {
        for good in ["127.0.0.1:9945", "0.0.0.0:0", "[::1]:9945"] {
            assert_eq!(address(good).unwrap().to_string(), good);
        }
        for bad in [":9945", "localhost:9945", "127.0.0.1", "::1:9945", "127.0.0.1:99999", ""] {
            assert!(address(bad).unwrap_err().contains("such as 127.0.0.1:9945"), "{bad}");
        }
    }
}
