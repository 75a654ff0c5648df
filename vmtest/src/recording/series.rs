//! What was recorded: series, each with a value at some of the looks; and the same as OpenMetrics text.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::{Context, Result, bail, ensure};

/// A metric's name with its labels, whose values are as they are written, escapes and all.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Series {
    /// The metric.
    pub name: String,
    /// Name -> value.
    pub labels: BTreeMap<String, String>,
}

impl Series {
    /// The value of a label; nothing if it has none of that name.
    pub fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }

    /// Reads the beginning of a line; returns the rest as well.
    fn parse(line: &str) -> Option<(Self, &str)> {
        let end = line.find(['{', ' '])?;
        let (name, mut rest) = line.split_at(end);
        let mut labels = BTreeMap::new();
        if let Some(inner) = rest.strip_prefix('{') {
            rest = inner;
            while !rest.starts_with('}') {
                let (label, quoted) = rest.split_once("=\"")?;
                let mut escaped = false;
                let end = quoted.find(|c| {
                    let ends = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    ends
                })?;
                labels.insert(label.trim_start_matches(',').to_owned(), quoted[..end].to_owned());
                rest = &quoted[end + 1..];
            }
            rest = &rest[1..];
        }
        let name = name.to_owned();
        Some((Self { name, labels }, rest.trim_start()))
    }
}

impl fmt::Display for Series {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.name)?;
        if self.labels.is_empty() {
            return Ok(());
        }
        let labels = self
            .labels
            .iter()
            .map(|(name, value)| format!("{name}=\"{value}\""));
        write!(out, "{{{}}}", labels.collect::<Vec<_>>().join(","))
    }
}

/// What is said of a metric.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct About {
    kind: String,
    help: String,
}

/// Metrics of all hosts over a run. Written out it is a file that `promtool tsdb create-blocks-from openmetrics` takes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// When somebody looked, in seconds since 1970.
    looks: BTreeSet<u64>,
    about: BTreeMap<String, About>,
    series: BTreeMap<Series, BTreeMap<u64, f64>>,
}

impl Recording {
    /// When somebody looked, in seconds since 1970.
    pub fn looks(&self) -> impl DoubleEndedIterator<Item = u64> {
        self.looks.iter().copied()
    }

    /// Every series, with its values by the time of the look.
    pub fn series(&self) -> impl Iterator<Item = (&Series, &BTreeMap<u64, f64>)> {
        self.series.iter()
    }

    /// The series of one metric.
    pub fn of(&self, name: &str) -> impl Iterator<Item = (&Series, &BTreeMap<u64, f64>)> {
        self.series.iter().filter(move |(series, _)| series.name == name)
    }

    /// Type and meaning of a metric that [`Self::set`] is going to be called for.
    pub(super) fn describe(&mut self, name: &str, kind: &str, help: &str) {
        let (kind, help) = (kind.to_owned(), help.to_owned());
        self.about.insert(name.to_owned(), About { kind, help });
    }

    /// A value that was seen in a look.
    pub(super) fn set(&mut self, look: u64, name: &str, labels: &[(&str, &str)], value: f64) {
        let labels = labels
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned()));
        let series = Series {
            name: name.to_owned(),
            labels: labels.collect(),
        };
        self.insert(look, series, value);
    }

    fn insert(&mut self, look: u64, series: Series, value: f64) {
        self.looks.insert(look);
        self.series.entry(series).or_default().insert(look, value);
    }

    /// A page of the text format 0.0.4 that was seen in a look; `labels` are added to all of its series.
    ///
    /// # Errors
    /// When the page is not one.
    pub(super) fn add_page(&mut self, look: u64, labels: &[(&str, &str)], page: &str) -> Result<()> {
        for line in page.lines() {
            if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
                help.clone_into(&mut self.about.entry(name.to_owned()).or_default().help);
            } else if let Some((name, kind)) =
                line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
            {
                kind.clone_into(&mut self.about.entry(name.to_owned()).or_default().kind);
            } else {
                let (mut series, value) =
                    Series::parse(line).with_context(|| format!("no metric: {line}"))?;
                let value = value.parse().with_context(|| format!("no value: {line}"))?;
                let labels = labels
                    .iter()
                    .map(|&(name, value)| (name.to_owned(), value.to_owned()));
                series.labels.extend(labels);
                self.insert(look, series, value);
            }
        }
        Ok(())
    }

    /// Reads what was written.
    ///
    /// # Errors
    /// When it is something else.
    pub fn parse(text: &str) -> Result<Self> {
        let mut recording = Self::default();
        // Whom the next HELP is about.
        let mut described = String::new();
        let mut lines = text.lines();
        for line in &mut lines {
            if line == "# EOF" {
                break;
            } else if let Some((family, kind)) =
                line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
            {
                described = sample_of(family, kind);
                recording.describe(&described, kind, "");
            } else if let Some((_, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '))
            {
                help.clone_into(&mut recording.about.entry(described.clone()).or_default().help);
            } else {
                let (series, rest) = Series::parse(line).with_context(|| format!("no metric: {line}"))?;
                let (value, look) = rest.split_once(' ').with_context(|| format!("no time: {line}"))?;
                let value = value.parse().with_context(|| format!("no value: {line}"))?;
                let look = look.parse().with_context(|| format!("no time: {line}"))?;
                recording.insert(look, series, value);
            }
        }
        ensure!(text.ends_with("# EOF\n"), "the recording has no end");
        if let Some(line) = lines.next() {
            bail!("after the end: {line}");
        }
        Ok(recording)
    }
}

/// In OpenMetrics a counter's family has no `_total`, and its samples have.
fn sample_of(family: &str, kind: &str) -> String {
    match kind {
        "counter" => format!("{family}_total"),
        _ => family.to_owned(),
    }
}

impl fmt::Display for Recording {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = "";
        for (series, values) in &self.series {
            if series.name != last {
                last = &series.name;
                let about = self.about.get(last).cloned().unwrap_or_default();
                let family = last.strip_suffix("_total").unwrap_or(last);
                writeln!(out, "# TYPE {family} {}", about.kind)?;
                writeln!(out, "# HELP {family} {}", about.help)?;
            }
            for (look, value) in values {
                writeln!(out, "{series} {value} {look}")?;
            }
        }
        writeln!(out, "# EOF")
    }
}

#[cfg(test)]
mod tests {
    use super::{Recording, Series};

    #[test]
    fn a_page_becomes_openmetrics_with_labels_and_times() {
        let page = "# HELP dunlin_syncs_total Syncs\n# TYPE dunlin_syncs_total counter\n\
                    dunlin_syncs_total{vm=\"a,\\\"b\\\\\"} 7\n# HELP up Up\n# TYPE up gauge\nup 0.5\n";
        let mut recording = Recording::default();
        recording.add_page(10, &[("instance", "h")], page).unwrap();
        recording.add_page(12, &[("instance", "h")], page).unwrap();
        let text = recording.to_string();
        let expected = "# TYPE dunlin_syncs counter\n# HELP dunlin_syncs Syncs\n\
                        dunlin_syncs_total{instance=\"h\",vm=\"a,\\\"b\\\\\"} 7 10\n\
                        dunlin_syncs_total{instance=\"h\",vm=\"a,\\\"b\\\\\"} 7 12\n\
                        # TYPE up gauge\n# HELP up Up\nup{instance=\"h\"} 0.5 10\nup{instance=\"h\"} 0.5 12\n# EOF\n";
        assert_eq!(text, expected);
        assert_eq!(Recording::parse(&text).unwrap(), recording);
        assert!(Recording::parse(text.strip_suffix("# EOF\n").unwrap()).is_err());
        assert!(recording.add_page(14, &[], "<html>\n").is_err());
    }

    #[test]
    fn a_series_is_read_up_to_its_value() {
        let (series, rest) = Series::parse("x{a=\"1\",b=\"\"} 3 4").unwrap();
        assert_eq!(
            (series.label("a"), series.label("b"), series.label("c")),
            ("1", "", "")
        );
        assert_eq!((series.name.as_str(), rest), ("x", "3 4"));
        assert!(Series::parse("x{a=\"1} 3").is_none());
    }
}
