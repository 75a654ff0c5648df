module dunlin.dev/vmtest/counter

go 1.19
