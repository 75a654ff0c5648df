//! The order of places in a stream: 32 bits that go round, of which half a circle is ahead.
//!
//! Source: RFC 9293, 3.4.

/// Whether place `a` is after `b`.
#[must_use]
pub fn after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// The later of two places.
#[must_use]
pub fn later(a: u32, b: u32) -> u32 {
    if after(a, b) { a } else { b }
}

/// The earlier one.
#[must_use]
pub fn earlier(a: u32, b: u32) -> u32 {
    if after(a, b) { b } else { a }
}
