//! The report as a picture: throughput and latency by policy, and what a pause is made of.

use super::table::STEPS;
use super::{BenchReport, Row};

const COLOURS: [&str; 6] = ["#7a7a7a", "#d1793b", "#2f6f9f", "#5b9e5b", "#9b59a5", "#c0a030"];
const WIDTH: f64 = 900.0;
const PANEL: f64 = 250.0;
const LEFT: f64 = 70.0;

/// An SVG of the whole report.
pub fn plot(report: &BenchReport) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        4.0 * PANEL + 40.0
    );
    let throughput = |row: &Row| row.median.per_second;
    let title = format!("redis {} per second", report.test.to_uppercase());
    bars(&mut svg, report, 0.0, &title, &throughput);
    bars(&mut svg, report, PANEL, "latency p50, ms", &|row| {
        row.median.p50_ms
    });
    bars(&mut svg, report, 2.0 * PANEL, "latency p99, ms", &|row| {
        row.median.p99_ms
    });
    pauses(&mut svg, report, 3.0 * PANEL);
    let text = escape(&format!(
        "{} cores, {} % of a core per host in every policy",
        report.cores, report.host_cpu_percent
    ));
    svg.push_str(&format!(
        "<text x=\"{LEFT}\" y=\"{}\" fill=\"#555\">{text}</text>\n</svg>\n",
        4.0 * PANEL + 30.0
    ));
    svg
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

fn label(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    svg.push_str(&format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>\n",
        escape(text)
    ));
}

fn rect(svg: &mut String, x: f64, y: f64, width: f64, height: f64, colour: &str, title: &str) {
    svg.push_str(&format!(
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"><title>{}</title></rect>\n",
        escape(title)
    ));
}

/// The policies in the order of the rows.
fn policies(report: &BenchReport) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for row in &report.rows {
        if !names.contains(&row.policy.as_str()) {
            names.push(&row.policy);
        }
    }
    names
}

fn legend(svg: &mut String, names: &[&str], top: f64) {
    for (index, name) in names.iter().enumerate() {
        let x = WIDTH - 100.0 * (names.len() - index) as f64;
        rect(
            svg,
            x,
            top + 8.0,
            12.0,
            12.0,
            COLOURS[index % COLOURS.len()],
            name,
        );
        label(svg, x + 17.0, top + 18.0, "start", name);
    }
}

fn bars(svg: &mut String, report: &BenchReport, top: f64, title: &str, value: &dyn Fn(&Row) -> f64) {
    let names = policies(report);
    label(svg, LEFT, top + 18.0, "start", title);
    legend(svg, &names, top);
    let groups: Vec<&[Row]> = report.rows.chunks(names.len().max(1)).collect();
    let largest = report.rows.iter().map(value).fold(0.0, f64::max).max(1e-9);
    let (bottom, height) = (top + PANEL - 30.0, PANEL - 75.0);
    let group_width = (WIDTH - LEFT - 20.0) / groups.len().max(1) as f64;
    let bar_width = group_width * 0.8 / names.len().max(1) as f64;
    for (at, group) in groups.iter().enumerate() {
        let left = LEFT + at as f64 * group_width;
        for (index, row) in group.iter().enumerate() {
            let amount = value(row);
            let (x, tall) = (left + index as f64 * bar_width, amount / largest * height);
            let note = if amount >= 100.0 {
                format!("{amount:.0}")
            } else {
                format!("{amount:.2}")
            };
            rect(
                svg,
                x,
                bottom - tall,
                bar_width * 0.92,
                tall,
                COLOURS[index % COLOURS.len()],
                &row.policy,
            );
            label(svg, x + bar_width * 0.46, bottom - tall - 4.0, "middle", &note);
        }
        let connections = group.first().map_or(0, |row| row.connections);
        label(
            svg,
            left + group_width * 0.4,
            bottom + 16.0,
            "middle",
            &format!("{connections} connections"),
        );
    }
}

fn pauses(svg: &mut String, report: &BenchReport, top: f64) {
    let names: Vec<&str> = STEPS.iter().map(|(name, _)| *name).collect();
    label(
        svg,
        LEFT,
        top + 18.0,
        "start",
        "pause of one sync by step, ms (medians)",
    );
    legend(svg, &names, top);
    let rows: Vec<&Row> = report
        .rows
        .iter()
        .filter(|row| row.median.sync.get("pause_us").is_some_and(|&us| us > 0))
        .collect();
    let step = |row: &Row, key: &str| row.median.sync.get(key).copied().unwrap_or(0) as f64 / 1e3;
    let sum = |row: &Row| STEPS.iter().map(|(_, key)| step(row, key)).sum::<f64>();
    let largest = rows.iter().map(|row| sum(row)).fold(0.0, f64::max).max(1e-9);
    let line = ((PANEL - 60.0) / rows.len().max(1) as f64).min(30.0);
    for (at, row) in rows.iter().enumerate() {
        let y = top + 40.0 + at as f64 * line;
        label(
            svg,
            LEFT + 60.0,
            y + line * 0.6,
            "end",
            &format!("{} c={}", row.policy, row.connections),
        );
        let mut x = LEFT + 70.0;
        for (index, (name, key)) in STEPS.iter().enumerate() {
            let wide = step(row, key) / largest * (WIDTH - LEFT - 160.0);
            let title = format!("{name}: {:.2} ms", step(row, key));
            rect(
                svg,
                x,
                y,
                wide,
                line * 0.8,
                COLOURS[index % COLOURS.len()],
                &title,
            );
            x += wide;
        }
        label(
            svg,
            x + 5.0,
            y + line * 0.6,
            "start",
            &format!("{:.2}", step(row, "pause_us")),
        );
    }
}
