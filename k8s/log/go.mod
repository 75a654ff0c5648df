module dunlin.dev/log

go 1.19
