//! How a command names GPUs: as arguments or with `-g`.

use clap::Args;

/// GPUs as arguments, with `-g` as the alternative; all GPUs when none is named.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Gpus {
    /// GPUs: index, range 0-3, (start of) UUID, PCI address, model '*A100*' [default: all]
    #[arg(value_name = "GPU", value_delimiter = ',')]
    arguments: Vec<String>,
    /// The same as the argument; repeatable
    #[arg(long = "gpu", short = 'g', short_alias = 'i', value_name = "GPU", value_delimiter = ',')]
    options: Vec<String>,
}

impl Gpus {
    /// Returns the selectors. An empty list means all GPUs.
    pub(crate) fn selectors(&self) -> Vec<String> {
        [self.arguments.as_slice(), &self.options].concat()
    }
}

/// GPUs of a command that changes them: at least one must be named.
#[derive(Debug, Clone, Args)]
pub(crate) struct SomeGpus {
    /// GPUs: index, range 0-3, (start of) UUID, PCI address, model '*A100*'
    #[arg(value_name = "GPU", value_delimiter = ',', required_unless_present = "options")]
    some_gpus: Vec<String>,
    /// The same as the argument; repeatable
    #[arg(long = "gpu", short = 'g', short_alias = 'i', value_name = "GPU", value_delimiter = ',')]
    options: Vec<String>,
}

impl SomeGpus {
    /// Returns the selectors.
    pub(crate) fn selectors(&self) -> Vec<String> {
        [self.some_gpus.as_slice(), &self.options].concat()
    }
}

/// `-g` alone, where the arguments are something else.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct GpuOption {
    /// GPUs: index, range 0-3, (start of) UUID, PCI address, model '*A100*'; repeatable
    #[arg(long = "gpu", short = 'g', short_alias = 'i', value_name = "GPU", value_delimiter = ',')]
    pub(crate) gpus: Vec<String>,
}
