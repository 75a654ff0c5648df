//! The report as pictures, one SVG for each figure.

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::case::Kind;
use super::case::SERVICES;
use super::cost::GROUPS;
use super::report::{BASELINE, BenchReport, Medians, Row};
use super::table::STEPS;
use crate::image;

const WIDTH: u32 = 1000;
const LABELS: i32 = 220;
const COLOURS: [RGBColor; 8] = [
    RGBColor(122, 122, 122),
    RGBColor(209, 121, 59),
    RGBColor(192, 160, 48),
    RGBColor(91, 158, 91),
    RGBColor(47, 111, 159),
    RGBColor(155, 89, 165),
    RGBColor(196, 78, 82),
    RGBColor(60, 60, 60),
];

/// One line of a figure: its label, and for each series a value, if there is one.
pub(super) type Line = (String, Vec<Option<f64>>);

struct Figure<'a> {
    title: &'a str,
    series: Vec<&'a str>,
    lines: Vec<Line>,
    /// Where a line across the figure says what was aimed at.
    bar: Option<f64>,
    /// Series follow each other on one line instead of standing above each other.
    stacked: bool,
    /// A policy has the same colour in every figure, also in those without the baseline.
    first_colour: usize,
}

/// File name and SVG of each figure that has anything to show.
pub fn draw(report: &BenchReport) -> Result<Vec<(String, String)>> {
    let on = report.on.in_words();
    let policies: Vec<&str> = report.policies.iter().map(String::as_str).collect();
    let replicated: Vec<&str> = policies
        .iter()
        .copied()
        .filter(|&policy| policy != BASELINE)
        .collect();
    let lines = |policies: &[&str], wanted: &dyn Fn(&Row) -> bool, value: &dyn Fn(&Row) -> Option<f64>| {
        by_case(report, policies, wanted, value)
    };
    let service = |row: &Row| row.kind == Kind::Service;
    let median = |figure: fn(&Medians) -> f64| move |row: &Row| row.median.as_ref().map(figure);
    let figures = [
        (
            "throughput-services",
            "throughput, share of none (loaded)",
            &replicated,
            lines(&replicated, &|row| service(row) && row.connections > 1, &|row| {
                row.of_baseline.map(|share| share.median)
            }),
            Some(0.9),
        ),
        (
            "throughput-hard",
            "throughput of the hard cases, share of none",
            &replicated,
            lines(&replicated, &|row| !service(row), &|row| {
                row.of_baseline.map(|share| share.median)
            }),
            Some(0.9),
        ),
        (
            "latency-one-connection",
            "latency p50 at one connection, times none",
            &replicated,
            lines(&replicated, &|row| row.connections == 1, &|row| {
                row.latency_of_baseline.map(|times| times.median)
            }),
            Some(1.5),
        ),
        (
            "latency-p99",
            "latency p99 under load, ms",
            &policies,
            lines(
                &policies,
                &|row| service(row) && row.connections > 1,
                &median(|m| m.p99_ms),
            ),
            None,
        ),
        (
            "pages",
            "divergent pages of one sync (mean)",
            &replicated,
            lines(&replicated, &|_| true, &median(|m| figure(m, "divergent"))),
            None,
        ),
    ];
    let mut drawn = Vec::new();
    for (name, title, series, lines, bar) in figures {
        if !lines.is_empty() {
            let figure = Figure {
                title,
                series: series.clone(),
                lines,
                bar,
                stacked: false,
                first_colour: policies.len() - series.len(),
            };
            drawn.push((format!("{name}.svg"), svg(&on, &figure)?));
        }
    }
    let pauses = pauses(report);
    if !pauses.is_empty() {
        let steps = STEPS.iter().map(|(name, _)| *name).collect();
        let pause = stacked(&on, "pause of one sync by step, ms (means)", steps, pauses)?;
        drawn.push(("pause.svg".to_owned(), pause));
    }
    for service in SERVICES.into_iter().chain([image::SSH.name]) {
        let lines = costs(report, service);
        if !lines.is_empty() {
            let title = format!("{service}: CPU of one request by groups of threads, us");
            let cost = stacked(&on, &title, GROUPS.to_vec(), lines)?;
            drawn.push((format!("cost-{service}.svg"), cost));
        }
    }
    Ok(drawn)
}

/// A line for each host that did anything.
fn costs(report: &BenchReport, service: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    for row in report.rows.iter().filter(|row| row.service == service) {
        let Some(median) = &row.median else { continue };
        for host in median.cost.cpu_us.keys() {
            let groups: Vec<Option<f64>> = GROUPS
                .iter()
                .map(|group| Some(median.cost.on(host, &[*group])))
                .collect();
            if groups.iter().flatten().any(|us| *us >= 0.1) {
                lines.push((
                    format!("{} c={} {} on {host}", row.case, row.connections, row.policy),
                    groups,
                ));
            }
        }
    }
    lines
}

/// A figure whose series stand above each other for each line.
pub(super) fn grouped(on: &str, title: &str, series: Vec<&str>, lines: Vec<Line>) -> Result<String> {
    let figure = Figure {
        title,
        series,
        lines,
        bar: None,
        stacked: false,
        first_colour: 1,
    };
    svg(on, &figure)
}

/// A figure whose series follow each other on each line.
pub(super) fn stacked(on: &str, title: &str, series: Vec<&str>, lines: Vec<Line>) -> Result<String> {
    let figure = Figure {
        title,
        series,
        lines,
        bar: None,
        stacked: true,
        first_colour: 0,
    };
    svg(on, &figure)
}

fn figure(median: &Medians, name: &str) -> f64 {
    median.sync.get(name).copied().unwrap_or(0.0)
}

fn by_case(
    report: &BenchReport,
    policies: &[&str],
    wanted: &dyn Fn(&Row) -> bool,
    value: &dyn Fn(&Row) -> Option<f64>,
) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for row in report.rows.iter().filter(|row| wanted(row)) {
        let Some(at) = policies.iter().position(|&policy| policy == row.policy) else {
            continue;
        };
        let title = row.title();
        if lines.last().is_none_or(|(last, _)| *last != title) {
            lines.push((title, vec![None; policies.len()]));
        }
        if let Some((_, values)) = lines.last_mut() {
            values[at] = value(row);
        }
    }
    lines.retain(|(_, values)| values.iter().any(Option::is_some));
    lines
}

fn pauses(report: &BenchReport) -> Vec<Line> {
    let with_syncs = report.rows.iter().filter_map(|row| {
        let median = row.median.as_ref()?;
        let steps: Vec<Option<f64>> = STEPS
            .iter()
            .map(|(_, key)| Some(figure(median, key) / 1e3))
            .collect();
        (figure(median, "pause_us") > 0.0).then(|| (format!("{} {}", row.policy, row.title()), steps))
    });
    with_syncs.collect()
}

fn svg(on: &str, figure: &Figure<'_>) -> Result<String> {
    let slots = if figure.stacked {
        1
    } else {
        figure.series.len().max(1)
    };
    let height = 90 + u32::try_from(figure.lines.len() * (slots * 12 + 10)).context("a figure too tall")?;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        // The backend writes into a string: its error is a programmer's, and has a type of its own for each call.
        paint(&area, on, figure)
            .map_err(|error| anyhow::anyhow!("cannot draw '{}': {error}", figure.title))?;
    }
    Ok(text)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn paint(area: &Area<'_>, on: &str, figure: &Figure<'_>) -> Result<(), Box<dyn std::error::Error>> {
    area.fill(&WHITE)?;
    let sums = figure.lines.iter().map(|(_, values)| {
        let values = values.iter().flatten().copied();
        if figure.stacked {
            values.sum::<f64>()
        } else {
            values.fold(0.0, f64::max)
        }
    });
    let widest = sums.chain(figure.bar).fold(0.0, f64::max).max(1e-9) * 1.1;
    let slots = if figure.stacked {
        1
    } else {
        figure.series.len().max(1)
    };
    // One unit is one bar; half a unit lies above each group, and half below.
    let group = slots as f64 + 1.0;
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .margin_top(50)
        .x_label_area_size(25)
        .y_label_area_size(LABELS)
        .build_cartesian_2d(0.0..widest, (figure.lines.len() as f64 * group)..0.0)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .x_labels(8)
        .draw()?;
    let small = ("sans-serif", 11).into_font();
    let y_of = |at: usize, slot: usize| at as f64 * group + 0.5 + slot as f64;
    for (index, _) in figure.series.iter().enumerate() {
        let colour = COLOURS[(index + figure.first_colour) % COLOURS.len()];
        let bars = figure.lines.iter().enumerate().filter_map(|(at, (_, values))| {
            let value = values[index]?;
            let (slot, from) = if figure.stacked {
                (0, values[..index].iter().flatten().sum())
            } else {
                (index, 0.0)
            };
            let top = y_of(at, slot);
            Some(Rectangle::new(
                [(from, top), (from + value, top + 0.9)],
                colour.filled(),
            ))
        });
        chart.draw_series(bars)?;
    }
    for (at, (label, values)) in figure.lines.iter().enumerate() {
        let (_, y) = chart.backend_coord(&(0.0, y_of(at, 0) + slots as f64 / 2.0));
        area.draw(&Text::new(label.clone(), (10, y - 6), small.clone()))?;
        let shown: Vec<(usize, f64, f64)> = if figure.stacked {
            let sum = values.iter().flatten().sum();
            vec![(0, sum, sum)]
        } else {
            let values = values.iter().enumerate();
            values
                .filter_map(|(slot, value)| Some((slot, (*value)?, (*value)?)))
                .collect()
        };
        for (slot, end, value) in shown {
            let (x, y) = chart.backend_coord(&(end, y_of(at, slot) + 0.45));
            area.draw(&Text::new(format!("{value:.2}"), (x + 4, y - 6), small.clone()))?;
        }
    }
    if let Some(bar) = figure.bar {
        let below = figure.lines.len() as f64 * group;
        chart.draw_series(LineSeries::new([(bar, 0.0), (bar, below)], RED.stroke_width(1)))?;
    }
    area.draw(&Text::new(
        figure.title.to_owned(),
        (10, 8),
        ("sans-serif", 15).into_font(),
    ))?;
    area.draw(&Text::new(on.to_owned(), (10, 30), small.clone()))?;
    for (index, name) in figure.series.iter().enumerate() {
        let x = i32::try_from(WIDTH)? - 90 * i32::try_from(figure.series.len() - index)?;
        let colour = COLOURS[(index + figure.first_colour) % COLOURS.len()];
        area.draw(&Rectangle::new([(x, 12), (x + 11, 23)], colour.filled()))?;
        area.draw(&Text::new((*name).to_owned(), (x + 15, 11), small.clone()))?;
    }
    area.present()?;
    Ok(())
}
