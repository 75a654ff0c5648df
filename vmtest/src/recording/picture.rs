//! A recording as a picture: who was what, what clients had of it, how long the VM stood still; the steps across all of it.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::{ANSWERS, KILLED, Recording, STEP, UP};

const SIZE: (u32, u32) = (1000, 640);
const LEFT: u32 = 70;
const RIGHT: u32 = 20;
/// Rows of labels of the steps; neighbours must not stand on each other.
const ROWS: usize = 3;
const LETTER: f64 = 6.5;
/// A line does not go on over so many seconds without a value.
const BREAK: f64 = 6.0;

const PROTECTED: RGBColor = RGBColor(91, 158, 91);
const ALONE: RGBColor = RGBColor(209, 80, 59);
const BACKUP: RGBColor = RGBColor(120, 170, 210);
const WITNESS: RGBColor = RGBColor(200, 200, 200);
const DOWN: RGBColor = RGBColor(40, 40, 40);
const LINE: RGBColor = RGBColor(47, 111, 159);
const STEPS: RGBColor = RGBColor(110, 110, 110);

/// What a host was, in the order of the legend.
const STATES: [(&str, RGBColor); 5] = [
    ("primary, protected", PROTECTED),
    ("primary, unprotected", ALONE),
    ("backup", BACKUP),
    ("witness", WITNESS),
    ("dead", DOWN),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;
/// Seconds since the first look, and a value.
type Points = Vec<(f64, f64)>;

/// The picture as SVG.
///
/// # Errors
/// When there is nothing to draw.
pub fn draw(recording: &Recording) -> Result<String> {
    let first = recording.looks().next().context("nothing was recorded")?;
    let last = recording.looks().next_back().context("nothing was recorded")?;
    let seconds = 0.0..(last - first) as f64;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        // The backend writes into a string: its error is a programmer's, and has a type of its own for each call.
        paint(&area, recording, first, &seconds)
            .map_err(|error| anyhow::anyhow!("cannot draw the recording: {error}"))?;
    }
    Ok(text)
}

fn paint(area: &Area<'_>, recording: &Recording, first: u64, seconds: &Range<f64>) -> Drawn {
    area.fill(&WHITE)?;
    let (top, rest) = area.split_vertically(60 + 16 * ROWS as u32);
    let (hosts, rest) = rest.split_vertically(120);
    let (answers, pauses) = rest.split_vertically(210);
    let steps = steps(recording, first);
    paint_steps(&top, &steps, seconds)?;
    paint_hosts(&hosts, recording, first, &steps, seconds)?;
    paint_line(
        &answers,
        "answers a second",
        &per_second(recording, first),
        &steps,
        seconds,
    )?;
    paint_line(
        &pauses,
        "pause of a sync, ms",
        &pauses_ms(recording, first),
        &steps,
        seconds,
    )?;
    area.present()?;
    Ok(())
}

/// When each step began, by its name.
fn steps(recording: &Recording, first: u64) -> Vec<(f64, String)> {
    let mut steps: Vec<(f64, String)> = recording
        .of(STEP)
        .filter_map(|(series, values)| {
            let at = values.values().next()? - first as f64;
            Some((at.max(0.0), series.label("step").to_owned()))
        })
        .collect();
    steps.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    steps
}

fn colour_of(step: &str) -> RGBColor {
    if step == KILLED { RED } else { STEPS }
}

/// The legend, and a label above each step.
fn paint_steps(area: &Area<'_>, steps: &[(f64, String)], seconds: &Range<f64>) -> Drawn {
    let small = ("sans-serif", 12).into_font();
    let mut x = i32::try_from(LEFT)?;
    for (name, colour) in STATES {
        area.draw(&Rectangle::new([(x, 12), (x + 11, 23)], colour.filled()))?;
        area.draw(&Text::new(name, (x + 16, 12), small.clone()))?;
        x += 40 + (name.len() as f64 * LETTER) as i32;
    }
    let per_second = f64::from(SIZE.0 - LEFT - RIGHT) / seconds.end;
    let mut ends = [f64::MIN; ROWS];
    for (at, name) in steps {
        let x = f64::from(LEFT) + at * per_second;
        // The lowest row that is free here.
        let row = (0..ROWS).rev().find(|&row| ends[row] < x).unwrap_or(0);
        ends[row] = x + (name.len() as f64 + 1.0) * LETTER;
        let y = 44 + 16 * i32::try_from(row)?;
        let style = small.color(&colour_of(name));
        area.draw(&Text::new(name.clone(), (x as i32 + 3, y), style))?;
        let bottom = i32::try_from(area.dim_in_pixel().1)?;
        let line = vec![(x as i32, y + 2), (x as i32, bottom)];
        area.draw(&PathElement::new(line, colour_of(name).stroke_width(1)))?;
    }
    Ok(())
}

/// What each host was at each look.
fn states(recording: &Recording) -> BTreeMap<String, Vec<(u64, RGBColor)>> {
    let of_host = |name: &str, host: &str, look: u64, role: &str| {
        let mut series = recording.of(name);
        series.any(|(series, values)| {
            let fits = series.label("instance") == host && (role.is_empty() || series.label("role") == role);
            fits && values.get(&look).is_some_and(|&value| value > 0.0)
        })
    };
    let mut states = BTreeMap::new();
    for (series, values) in recording.of(UP) {
        let host = series.label("instance");
        let seen = values.iter().filter_map(|(&look, &up)| {
            let is = |role: &str| of_host("dunlin_role", host, look, role);
            let colour = if up == 0.0 {
                DOWN
            } else if is("primary") {
                match of_host("dunlin_protected", host, look, "") {
                    true => PROTECTED,
                    false => ALONE,
                }
            } else if is("backup") {
                BACKUP
            } else if is("witness") {
                WITNESS
            } else {
                return None;
            };
            Some((look, colour))
        });
        states.insert(host.to_owned(), seen.collect());
    }
    states
}

fn paint_hosts(
    area: &Area<'_>,
    recording: &Recording,
    first: u64,
    steps: &[(f64, String)],
    seconds: &Range<f64>,
) -> Drawn {
    let states = states(recording);
    let mut chart = ChartBuilder::on(area)
        .margin_right(RIGHT)
        .set_label_area_size(LabelAreaPosition::Left, LEFT)
        .build_cartesian_2d(seconds.clone(), states.len() as f64..0.0)?;
    let looks: Vec<u64> = recording.looks().collect();
    for (row, (host, seen)) in states.iter().enumerate() {
        let (top, bottom) = (row as f64 + 0.15, row as f64 + 0.85);
        // A state lasts until the next look; looks with the same state make one bar.
        for bar in seen.chunk_by(|(_, one), (_, other)| one == other) {
            let ((from, colour), (to, _)) = (bar[0], bar[bar.len() - 1]);
            let to = looks.iter().copied().find(|&look| look > to).unwrap_or(to);
            let corners = [((from - first) as f64, top), ((to - first) as f64, bottom)];
            chart.draw_series([Rectangle::new(corners, colour.filled())])?;
        }
        let (_, y) = chart.backend_coord(&(0.0, row as f64 + 0.5));
        let (_, above) = area.get_base_pixel();
        let at = (14, y - above - 6);
        area.draw(&Text::new(
            format!("host {host}"),
            at,
            ("sans-serif", 13).into_font(),
        ))?;
    }
    let marks = steps.iter().map(|(at, name)| {
        let line = vec![(*at, 0.0), (*at, states.len() as f64)];
        PathElement::new(line, colour_of(name).stroke_width(1))
    });
    chart.draw_series(marks)?;
    Ok(())
}

fn paint_line(
    area: &Area<'_>,
    title: &str,
    points: &Points,
    steps: &[(f64, String)],
    seconds: &Range<f64>,
) -> Drawn {
    let highest = points.iter().map(|(_, value)| *value).fold(1e-9, f64::max) * 1.1;
    let mut chart = ChartBuilder::on(area)
        .margin_right(RIGHT)
        .margin_top(10)
        .caption(title, ("sans-serif", 13))
        .x_label_area_size(25)
        .y_label_area_size(LEFT)
        .build_cartesian_2d(seconds.clone(), 0.0..highest)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_labels(12)
        .y_labels(5)
        .x_label_formatter(&|at| format!("{at:.0} s"))
        .y_label_formatter(&|value| format!("{value:.0}"))
        .draw()?;
    let marks = steps.iter().map(|(at, name)| {
        let line = vec![(*at, 0.0), (*at, highest)];
        PathElement::new(line, colour_of(name).stroke_width(1))
    });
    chart.draw_series(marks)?;
    for part in points.chunk_by(|(one, _), (other, _)| other - one <= BREAK) {
        chart.draw_series(LineSeries::new(part.iter().copied(), LINE.stroke_width(2)))?;
    }
    Ok(())
}

/// How fast the clients were answered from one look to the next.
fn per_second(recording: &Recording, first: u64) -> Points {
    let mut points = Points::new();
    for (_, values) in recording.of(ANSWERS) {
        let values: Vec<(u64, f64)> = values.iter().map(|(&look, &value)| (look, value)).collect();
        points.extend(values.windows(2).map(|pair| {
            let [(before, less), (look, more)] = [pair[0], pair[1]];
            ((look - first) as f64, (more - less) / (look - before) as f64)
        }));
    }
    points
}

/// How long the VM stood still for a sync, on average over those from one look to the next.
fn pauses_ms(recording: &Recording, first: u64) -> Points {
    let mut points = Points::new();
    for (series, paused) in recording.of("dunlin_sync_paused_seconds_total") {
        let host = series.label("instance");
        let same = |(other, _): &(&super::Series, _)| other.label("instance") == host;
        let Some((_, syncs)) = recording.of("dunlin_syncs_total").find(same) else {
            continue;
        };
        let looks: Vec<u64> = paused.keys().copied().collect();
        for pair in looks.windows(2) {
            let grown = |values: &BTreeMap<u64, f64>| Some(values.get(&pair[1])? - values.get(&pair[0])?);
            // Both begin anew with another primary.
            if let (Some(paused), Some(syncs)) = (grown(paused), grown(syncs))
                && syncs > 0.0
                && paused >= 0.0
            {
                points.push(((pair[1] - first) as f64, paused / syncs * 1e3));
            }
        }
    }
    points.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    points
}
