//! Reads gres.conf line by line.

use super::{
    super::{HostList, KeyValue, LogicalLine, gres_count, lines, slurm_conf::MOST_INCLUDED},
    AutoDetect, GresConf, GresConfError, GresProblem, GresRecord, Position, UnknownKey,
};

/// Maximum depth to which files may include each other.
const DEEPEST: usize = 16;

/// Reads the text, and all files that it includes.
pub(super) fn read(
    text: &str,
    node: &str,
    read_include: &dyn Fn(&str) -> Option<String>,
) -> Result<GresConf, GresConfError> {
    let mut reader = GresReader {
        node,
        read_include,
        included_files: 0,
        records: Vec::new(),
        global: None,
        of_node: None,
        unknown: Vec::new(),
    };
    reader.file(text, None, 0)?;
    GresConf::of(reader.records, reader.of_node.or(reader.global), reader.unknown)
}

struct GresReader<'a> {
    node: &'a str,
    read_include: &'a dyn Fn(&str) -> Option<String>,
    /// Number of files that were included so far.
    included_files: usize,
    records: Vec<GresRecord>,
    /// Values of `AutoDetect=`: for all nodes, and for this node.
    global: Option<AutoDetect>,
    of_node: Option<AutoDetect>,
    unknown: Vec<UnknownKey>,
}

/// The pairs of a line, by key.
#[derive(Default)]
struct Fields {
    node_name: Option<String>,
    name: Option<String>,
    gres_type: Option<String>,
    file: Option<String>,
    multiple_files: Option<String>,
    count: Option<String>,
    cores: Option<String>,
    flags: Option<String>,
    unique_id: Option<String>,
    auto_detect: Option<String>,
    unknown: Vec<String>,
}

impl GresReader<'_> {
    fn file(&mut self, text: &str, included: Option<&str>, depth: usize) -> Result<(), GresConfError> {
        for line in lines(text) {
            let place = Position { included: included.map(str::to_owned), line: line.number };
            let result = match line.include() {
                Some(path) if depth == DEEPEST || self.included_files == MOST_INCLUDED => {
                    Err(GresProblem::TooManyIncludes(path.to_owned()))
                }
                Some(path) => match (self.read_include)(path) {
                    Some(text) => {
                        self.included_files += 1;
                        self.file(&text, Some(path), depth + 1)?;
                        Ok(())
                    }
                    None => Err(GresProblem::Include(path.to_owned())),
                },
                None => self.line(&line, &place),
            };
            result.map_err(|problem| GresConfError { place, problem })?;
        }
        Ok(())
    }

    fn line(&mut self, line: &LogicalLine, place: &Position) -> Result<(), GresProblem> {
        let pairs = line.pairs()?;
        let first = pairs.first().map(|pair| pair.key.clone()).unwrap_or_default();
        if !["Name", "NodeName", "AutoDetect"].iter().any(|key| first.eq_ignore_ascii_case(key)) {
            return Err(GresProblem::FirstKey(first));
        }
        let fields = Fields::of(pairs);
        let concerns = match &fields.node_name {
            Some(nodes) => list("NodeName", nodes)?.contains(self.node),
            None => true,
        };
        if !concerns {
            return Ok(());
        }
        if let Some(value) = &fields.auto_detect {
            let value = auto_detect(value);
            if fields.node_name.is_some() { self.of_node = Some(value) } else { self.global = Some(value) }
        }
        let unknown = fields.unknown.iter().map(|key| UnknownKey { key: key.clone(), place: place.clone() });
        self.unknown.extend(unknown);
        self.records.extend(fields.record(place)?);
        Ok(())
    }
}

impl Fields {
    fn of(pairs: Vec<KeyValue>) -> Self {
        let mut fields = Self::default();
        for KeyValue { key, value } in pairs {
            // If a key is repeated, Slurm uses its last value.
            let field = match key.to_ascii_lowercase().as_str() {
                "nodename" => &mut fields.node_name,
                "name" => &mut fields.name,
                "type" => &mut fields.gres_type,
                "file" => &mut fields.file,
                "multiplefiles" => &mut fields.multiple_files,
                "count" => &mut fields.count,
                "cores" | "cpus" => &mut fields.cores,
                "flags" => &mut fields.flags,
                "uniqueid" => &mut fields.unique_id,
                "autodetect" => &mut fields.auto_detect,
                "link" | "links" => continue,
                _ => {
                    fields.unknown.push(key);
                    continue;
                }
            };
            *field = Some(value);
        }
        fields
    }

    /// Returns the record; `None` if the line contains only `AutoDetect`.
    fn record(self, place: &Position) -> Result<Option<GresRecord>, GresProblem> {
        let (key, written) = match (&self.file, &self.multiple_files) {
            (Some(_), Some(_)) => return Err(GresProblem::FileAndMultipleFiles),
            (Some(files), None) => ("File", files.as_str()),
            (None, Some(files)) => ("MultipleFiles", files.as_str()),
            (None, None) => ("File", ""),
        };
        let expand = |error| GresProblem::List { key, error };
        let files = list(key, written)?.expand().map_err(expand)?;
        let multiple_files = self.multiple_files.is_some();
        let devices = if multiple_files { 1 } else { files.len() };
        let given = match &self.count {
            Some(text) => Some(gres_count::count(text).ok_or_else(|| GresProblem::Count(text.clone()))?),
            None => None,
        };
        let Some(name) = self.name else {
            return if self.auto_detect.is_some() && written.is_empty() { Ok(None) } else { Err(GresProblem::NoName) };
        };
        // For `mps` and `shard`, the count is the number of shares, not of device files.
        let shared = ["mps", "shard"].iter().any(|shares| name.eq_ignore_ascii_case(shares));
        if let Some(count) = given
            && !shared
            && !files.is_empty()
            && count != devices as u64
        {
            return Err(GresProblem::CountDiffers { count, files: devices });
        }
        let flags = self.flags.as_deref().unwrap_or_default();
        Ok(Some(GresRecord {
            name,
            gres_type: self.gres_type,
            count: given.unwrap_or(if files.is_empty() { 1 } else { devices as u64 }),
            files,
            multiple_files,
            cores: self.cores,
            flags: flags.split(',').filter(|flag| !flag.is_empty()).map(str::to_owned).collect(),
            unique_id: self.unique_id,
            place: place.clone(),
        }))
    }
}

fn list(key: &'static str, text: &str) -> Result<HostList, GresProblem> {
    HostList::parse(text).map_err(|error| GresProblem::List { key, error })
}

fn auto_detect(value: &str) -> AutoDetect {
    match value.to_ascii_lowercase().as_str() {
        "nvml" => AutoDetect::Nvml,
        "nvidia" => AutoDetect::Nvidia,
        "off" => AutoDetect::Off,
        _ => AutoDetect::Other(value.to_owned()),
    }
}
